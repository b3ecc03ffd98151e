"""``accelerate()``: the operation in place of the reference code of transformers' recurrent layers.

Without the packages fla and mamba-ssm, which need Triton or CUDA, transformers computes gated delta rules, Kimi Delta Attention and
the scans of Mamba by reference functions in Python. Each model has a copy of them, marked by one decorator with the name of the
kernel that they stand for. ``functions`` has what takes their place.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..errors import Mistake
from .functions import (
    convolution_update,
    delta_rule,
    mamba2_scan,
    one_by_one,
    packed_convolution,
    selective_scan,
    state_update,
)

logger = logging.getLogger(__name__)
DECORATOR = "use_kernel_func_from_hub_with_fallback"  # of transformers, since 5.15
MARKED = re.compile(rf'^@{DECORATOR}\(\s*"(\w+)"[^)]*\)\s*\ndef (\w+)', re.MULTILINE)
REPLACED: dict[str, Callable[..., Any]] = {  # by the name of the kernel
    "chunk_gated_delta_rule": delta_rule,
    "fused_recurrent_gated_delta_rule": delta_rule,
    "chunk_kda": delta_rule,
    "fused_recurrent_kda": delta_rule,
    "mamba_chunk_scan_combined": mamba2_scan,
    "selective_scan_fn": selective_scan,
    "selective_state_update": state_update,
    "causal_conv1d_update": convolution_update,
}
PACKED: dict[str, Callable[..., Any]] = {  # for packed texts alone, which the references refuse
    "causal_conv1d_fn": packed_convolution,
    "mamba_split_conv1d_scan_combined": one_by_one,
}


def replacement(kernel: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function that takes the place of ``original``, which transformers' decorator has made for this kernel. Exports,
    and tensors on a GPU for which the kernel is there, are the original's."""
    own, first = (REPLACED | PACKED)[kernel], [*inspect.signature(inspect.unwrap(original)).parameters]
    known = inspect.getclosurevars(original).nonlocals if inspect.isfunction(original) else {}
    has_kernel = known.get("is_new_implementation", False)
    operands = sum(p.kind == p.POSITIONAL_OR_KEYWORD and p.default is p.empty for p in inspect.signature(own).parameters.values())

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(first, args)) | kwargs
        on_cpu = next(iter(given.values())).device.type == "cpu"
        if torch.compiler.is_exporting() or (has_kernel and not on_cpu):
            return original(*args, **kwargs)
        found = own(*[given.pop(name) for name in first[:operands]], **given)
        return original(*args, **kwargs) if found is NotImplemented else found

    run.replaces = original  # type: ignore[attr-defined]
    return run


@functools.cache
def marked_functions() -> list[tuple[str, str, str]]:
    """Returns the module, the kernel and the name of every reference function in transformers, whether it is imported or not."""
    import transformers.models

    found = []
    for path in sorted(Path(transformers.models.__path__[0]).glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if DECORATOR in text:
            found += [(f"transformers.models.{path.parent.name}.{path.stem}", *names) for names in MARKED.findall(text)]
    return found


def is_replaced(kernel: str, module: str) -> bool:
    """Whether a function of this module is. No one tells the scan of Mamba 1 where texts begin: what refuses several stays."""
    scans = {name for name, found, _ in marked_functions() if found == "selective_scan_fn"}
    return kernel in REPLACED or (kernel in PACKED and module not in scans)


class Acceleration:
    """Says in one line what ``accelerate`` did; as a context it undoes it at the end of its block."""

    def __init__(self) -> None:
        found: dict[bool, dict[str, set[str]]] = {True: {}, False: {}}
        for module, kernel, _ in marked_functions():
            found[kernel in REPLACED].setdefault(kernel, set()).add(module.split(".")[2])
        self.replaced, self.left = found[True], found[False]

    def __repr__(self) -> str:
        models = sorted(set().union(*self.replaced.values()))
        return (
            f"fw_fairseq computes {', '.join(sorted(self.replaced))} in the models {', '.join(models)} of transformers;"
            f" their own code computes {', '.join(sorted(self.left))}"
        )

    def __enter__(self) -> Acceleration:
        return self

    def __exit__(self, *error: object) -> None:
        accelerate(False)


def accelerate(on: bool = True) -> Acceleration | None:
    """Lets transformers' recurrent layers compute with ``fast_weight`` where they would run their reference code in Python: gated
    delta rules, Kimi Delta Attention and the scans of Mamba, in training and in generation, in models that are there already and
    in those that are made later. ``accelerate(False)`` undoes it; ``with accelerate():`` is for one block."""
    hub = importlib.import_module("transformers.integrations.hub_kernels")
    made = getattr(hub, DECORATOR, None)
    if made is None:
        raise Mistake("accelerate() knows transformers from 5.15 on, whose models mark the functions that kernels may replace")
    original = getattr(made, "replaces", made)
    decorator = _replacing(original) if on else original
    for module in (hub, importlib.import_module("transformers.integrations")):  # models that are imported later
        setattr(module, DECORATOR, decorator)
    for name, kernel, function in marked_functions():
        if name in sys.modules and is_replaced(kernel, name):
            there = getattr(sys.modules[name], function)
            before = getattr(there, "replaces", there)
            setattr(sys.modules[name], function, replacement(kernel, before) if on else before)
    if not on:
        return None
    done = Acceleration()
    logger.info("%s", done)
    return done


def _replacing(original: Callable[..., Any]) -> Callable[..., Any]:
    """transformers' decorator, which puts our function in the place of what it makes."""

    @functools.wraps(original)
    def decorate(kernel: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        mark = original(kernel, *args, **kwargs)

        def put(function: Callable[..., Any]) -> Callable[..., Any]:
            made = mark(function)
            return replacement(kernel, made) if is_replaced(kernel, function.__module__) else made

        return put

    decorate.replaces = original  # type: ignore[attr-defined]
    return decorate
