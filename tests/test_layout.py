"""Where the package's files lie, and which of them may import which: docs/architecture.md has the layers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fw_fairseq"
ENTRIES = ("__init__", "late_registration")  # what fairseq and Python import first; they register all of it


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for path in PACKAGE.rglob("*.py")}


def imported(module: str) -> Iterator[str]:
    """The package's modules that a module imports, in its functions too."""
    path = FILES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                name = f"{source}.{alias.name}"
                if name in FILES:
                    yield name
                elif source in FILES:
                    yield source


ARROWS = {module: {other for other in imported(module) if other != module} for module in FILES}


def room(module: str) -> str:
    """The folder or file right below the package."""
    return [*module.split("."), "__init__"][1]


def layers() -> list[set[str]]:
    """The rooms of each row in the table of layers, lowest first."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = page.split("## The layers of the package")[1].split("\n## ")[0].splitlines()
    return [set(re.findall(r"`(\w+)`", row.split("|")[1])) for row in rows if row.startswith("| `")]


def test_every_room_has_one_layer():
    placed = [name for row in layers() for name in row]
    assert sorted(placed) == sorted({room(module) for module in FILES} - {*ENTRIES})


def test_nothing_imports_upward():
    level = {name: number for number, row in enumerate(layers()) for name in row}
    wrong = [
        (module, other)
        for module, others in ARROWS.items()
        for other in others
        if room(module) not in ENTRIES and room(module) != room(other) and not level.get(room(other), 99) < level[room(module)]
    ]
    assert not wrong


def test_no_import_circle():
    try:
        list(TopologicalSorter(ARROWS).static_order())
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_folders_are_small():
    folders = {path.parent for path in FILES.values()}
    sizes = {str(folder.relative_to(ROOT)): len([*folder.glob("*.py")]) for folder in folders}
    assert {name: size for name, size in sizes.items() if size > (8 if name == "fw_fairseq" else 12)} == {}


def test_every_folder_is_a_package():
    """Without __init__.py a folder is missing from what setuptools installs."""
    assert [path for path in PACKAGE.rglob("*.py") if not (path.parent / "__init__.py").is_file()] == []


def test_the_operation_needs_no_fairseq():
    """From files to mixers: a program without fairseq runs the operation, and an exported model."""
    free = {name for row in layers()[: [("mixers" in row) for row in layers()].index(True) + 1] for name in row} | {"huggingface"}
    wrong = []
    for module in (module for module in FILES if room(module) in free):
        for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            wrong += [(module, name) for name in names if name.split(".")[0] == "fairseq"]
    assert wrong == []
