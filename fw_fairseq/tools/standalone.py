"""The code of an exported folder: one file that needs torch and transformers alone.

It holds the modules that the model is made of, as they are in this package, and a loader for them. Where the package is installed,
it is used, since it also has the CUDA kernels.
"""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAME = "fw_fairseq_of_a_model"
# Modules that folders need, and for each model the classes of its configuration and of itself
START = "huggingface"
CLASSES = {
    START: [("FastWeightHFConfig", "FastWeightForCausalLM"), ("FastWeightTranslationConfig", "FastWeightForTranslation")],
    "pretrained.exported": [("ConvertedConfig", "ConvertedForCausalLM")],
}
HEAD = '''"""The model of this folder, for transformers. Written by fw-export-hf of the package fw_fairseq, whose licence is MIT.

SOURCES at the end has the modules of that package which the model needs. They are used where the package is not installed. Their
lines begin with |, because transformers takes a line that begins with an import for one of this file.
"""

import importlib
import sys
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.util import spec_from_loader

NAME = "fw_fairseq_of_a_model"


class Modules(MetaPathFinder, InspectLoader):
    """Finds and loads the modules in SOURCES as parts of a package called NAME."""

    def find_spec(self, name, path=None, target=None):
        package, _, module = name.partition(".")
        if package != NAME or module not in SOURCES:
            return None
        inside = module in PACKAGES
        place = f"{__file__.removesuffix('.py')}/{module.replace('.', '/')}{'/__init__' * inside}.py"
        spec = spec_from_loader(name, self, origin=place, is_package=inside)
        spec.has_location = True  # it has a name, although there is no such file
        return spec

    def is_package(self, name):
        return name.partition(".")[2] in PACKAGES

    def get_source(self, name):
        return "".join(line[1:] + "\\n" for line in SOURCES[name.partition(".")[2]].splitlines())


def load():
    try:
        found = importlib.import_module("fw_fairseq.START")
        found.LAST  # which older versions of the package do not have
        return found
    except (ImportError, AttributeError):
        if not any(type(finder).__name__ == "Modules" and finder.__module__ == __name__ for finder in sys.meta_path):
            sys.meta_path.append(Modules())
        return importlib.import_module(f"{NAME}.START")

'''
TAIL = """

huggingface = load()
"""
PAIR = """

class CONFIG(huggingface.CONFIG):
    def __init__(self, *args, **kwargs):  # transformers would write another one
        super().__init__(*args, **kwargs)


class MODEL(huggingface.MODEL):
    config_class = CONFIG
"""


def code(start: str = START) -> str:
    """Returns the text of the file. start: the module with the classes of the folder."""
    modules = needed(start)
    sources = "".join(f"    {name!r}: {quoted(source(name))},\n" for name in modules)
    packages = {name for name in modules if path_of(name).name == "__init__.py"}
    head = HEAD.replace(NAME, f"{NAME}_{hashlib.sha256(sources.encode()).hexdigest()[:16]}")  # folders of two versions are two
    head = head.replace("START", start).replace("LAST", CLASSES[start][-1][1])
    classes = "".join(PAIR.replace("CONFIG", config).replace("MODEL", model) for config, model in CLASSES[start])
    return f"{head}\nPACKAGES = {sorted(packages)!r}\nSOURCES = {{\n{sources}}}\n{TAIL}{classes}"


def start_of(kind: str) -> str:
    """Returns the module of a model's class, of which its folder needs the code."""
    return next((start for start, pairs in CLASSES.items() if any(kind in pair for pair in pairs)), START)


def needed(start: str) -> list[str]:
    """Returns the names of the modules that the model imports, at once or later, beginning with the package itself, ''."""
    found: set[str] = set()
    left = [start]
    while left:
        if (name := left.pop()) not in found:
            found.add(name)
            left += [*([name.rpartition(".")[0]] if name else []), *imported(name)]
    return sorted(found)


def imported(name: str) -> list[str]:
    """Returns the modules of this package that a module imports."""
    found = []
    for node in ast.walk(ast.parse(source(name))):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = [*filter(None, name.split("."))]
            parts = parts[: len(parts) - node.level + (path_of(name).name == "__init__.py")]
            base = ".".join([*parts, *filter(None, [node.module])])
            names = [base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)]
            found += [each for each in names if each and path_of(each).exists()]
    return found


def path_of(name: str) -> Path:
    """Returns the file of a module."""
    place = ROOT.joinpath(*filter(None, name.split(".")))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def source(name: str) -> str:
    """Returns the source of a module. That of the package itself is empty: it waits for fairseq."""
    return path_of(name).read_text(encoding="utf-8") if name else ""


def quoted(text: str) -> str:
    """Returns a raw string literal of a module's source with | before each line."""
    lines = "".join(f"|{line}\n" for line in text.splitlines())
    return f"r'''{lines}'''" if "'''" not in lines else repr(lines)
