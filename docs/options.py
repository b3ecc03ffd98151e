"""Prints docs/options.md, every option that this project adds to fairseq's commands: python docs/options.py >docs/options.md"""

from __future__ import annotations

import sys
from dataclasses import Field, fields
from enum import Enum

from fairseq import registry
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY

import fw_fairseq.models  # noqa: F401
from fw_fairseq.config import (
    SOFTMAX,
    SPARSE_OPTIONS,
    FastWeightConfig,
    FastWeightTransformerConfig,
    mixer_options,
    option_name,
)
from fw_fairseq.feature_maps import FEATURE_MAPS
from fw_fairseq.mixers import MIXERS

HEAD = """\
# Options

`--user-dir fw_fairseq` adds these options to fairseq's commands. `fairseq-train --help` lists fairseq's own options, and those of
the `--arch`, `--task` and `--criterion` that it is given. `python docs/options.py` prints this page from the help texts.

A switch is `on` or `off` by default and takes no value: `--sru-tanh` turns one on, and
[its opposite](mixers.md#switches-in-both-directions), such as `--no-sru-rescale`, turns one off. Architectures have other defaults
for some options. An option that no part of the model reads is refused.
"""

TAIL = """\
## Environment variables

| variable | effect |
|---|---|
| `FW_TRACEBACK=1` | a mistake shows its traceback |
| `FW_FAIRSEQ_COMPILED=0` | no loops in C++ are compiled for the CPU; PyTorch computes the same |
| `CXX` | their compiler and its options, else `c++`; compiled loops are in `$XDG_CACHE_HOME/fw_fairseq` or `~/.cache/fw_fairseq` |
| `FW_FAIRSEQ_DECODING_GRAPH=0` | generation on a GPU uses no CUDA graph |
| `FW_FAIRSEQ_FP32=tf32` | CUDA kernels round operands of fp32 products to 11 bits, which is faster |
"""


def own(kind: type) -> list[Field]:
    """Returns the fields with a help text that a class of options has beyond those of fairseq's classes."""
    theirs = {
        f.name
        for base in kind.__mro__
        if not base.__module__.startswith("fw_fairseq")
        for f in getattr(base, "__dataclass_fields__", {}).values()
    }
    return [f for f in fields(kind) if f.name not in theirs and "help" in f.metadata]


def table(options: list[Field]) -> list[str]:
    """Returns a row for each option: its name, its default and the choices, and its help text."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for f in options:
        default = f.default.value if isinstance(f.default, Enum) else f.default
        if isinstance(default, bool):
            default = "on" if default else "off"
        elif isinstance(default, str) and default:
            default = f"`{default}`"
        text = f.metadata["help"].replace("|", "\\|")
        if isinstance(f.type, type) and issubclass(f.type, Enum):
            text += "; one of " + ", ".join(f"`{choice.value}`" for choice in f.type)
        lines.append(f"| `{option_name(f.name)}` | {'' if default is None else default} | {text} |")
    return [*lines, ""]


def groups() -> list[tuple[str, list[Field]]]:
    """Returns the options of models by what reads them, and then those of tasks, losses and schedules."""
    every = own(FastWeightConfig)
    readers: dict[str, tuple[str, ...]] = {}
    for f in every:
        maps = tuple(f"--feature-map {name}" for name, phi in FEATURE_MAPS.items() if f.name in phi.options)
        readers[f.name] = maps or tuple(f"--mixer {name}" for name in (SOFTMAX, *MIXERS) if f.name in mixer_options(name))
    found = [("The mixer of each layer", [f for f in every if f.name in ("mixer", "mixer_pattern")])]
    for names in dict.fromkeys(readers.values()):
        if names:
            found.append((", ".join(f"`{name}`" for name in names), [f for f in every if readers[f.name] == names]))
    found.append(("Sparse and reversible layers", [f for f in every if f.name in SPARSE_OPTIONS]))
    listed = {f.name for _, group in found for f in group}
    found.append(("All models", [f for f in every if f.name not in listed]))
    more = {f.name for f in every}
    found.append(("Language models", [f for f in own(MODEL_DATACLASS_REGISTRY["fast_weight_lm"]) if f.name not in more]))
    found.append(("Translation models", [f for f in own(FastWeightTransformerConfig) if f.name not in more]))
    named = more | {f.name for f in own(MODEL_DATACLASS_REGISTRY["fast_weight_lm"])}
    found.append(("`--arch pretrained_lm`", [f for f in own(MODEL_DATACLASS_REGISTRY["pretrained_lm"]) if f.name not in named]))
    found.append(("`--arch retrieval`", [f for f in own(MODEL_DATACLASS_REGISTRY["retrieval"]) if f.name not in more]))
    kinds = {"task": TASK_DATACLASS_REGISTRY} | {name: kinds["dataclass_registry"] for name, kinds in registry.REGISTRIES.items()}
    for option, registered in kinds.items():
        for name, kind in registered.items():
            if kind is not None and kind.__module__.startswith("fw_fairseq") and own(kind):
                found.append((f"`{option_name(option)} {name}`", own(kind)))
    return found


def page() -> str:
    """Returns the page as Markdown."""
    lines = [HEAD]
    for title, options in groups():
        lines += [f"## {title}", "", *table(options)]
    return "\n".join([*lines, TAIL])


if __name__ == "__main__":
    sys.stdout.write(page())
