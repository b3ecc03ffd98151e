"""``accelerate()``: the operation in place of the reference code of transformers' recurrent layers.

Without the packages fla and mamba-ssm, which need Triton or CUDA, transformers computes gated delta rules, Kimi Delta Attention and
the scan of Mamba 2 by reference functions in Python. Each model has a copy of them, marked by one decorator with the name of the
kernel that they stand for. Here are functions with their arguments and results that call ``fast_weight``.
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
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from .errors import Mistake
from .fla.delta_rules import gated
from .ops import FastWeightState, fast_weight

logger = logging.getLogger(__name__)
DECORATOR = "use_kernel_func_from_hub_with_fallback"  # of transformers, since 5.15
MARKED = re.compile(rf'^@{DECORATOR}\(\s*"(\w+)"[^\n]*\)\s*\ndef (\w+)', re.MULTILINE)


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule, or with a log decay g for each channel of the key Kimi Delta Attention: query and key (B,T,H,K), value
    (B,T,n H,V), g (B,T,n H) or (B,T,H,K), beta (B,T,n H). As the references do, it computes in float32, or more, and divides reads
    by the root of the keys' width. Texts in one row begin and end at cu_seqlens, or where seq_idx (1,T) changes."""
    if cu_seqlens is None and seq_idx is not None:
        cu_seqlens = F.pad((seq_idx[0].diff() != 0).nonzero().squeeze(1) + 1, (1, 0))
        cu_seqlens = F.pad(cu_seqlens, (0, 1), value=seq_idx.shape[1])
    given = query.dtype
    dtype = torch.promote_types(given, torch.float32)
    query, key, value, g, beta = (x.to(dtype) for x in (query, key, value, g, beta))
    options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "cu_seqlens": cu_seqlens}
    y, memory = gated(query, key, value, g, beta, None, initial_state, output_final_state, **options)
    return y.to(given), memory


def mamba2_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    seq_idx: Tensor | None = None,
    **unused: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """The scan of Mamba 2: x (B,T,H,P), dt (B,T,H), A and D (H), B and C (B,T,groups,N); the state is (B,H,P,N). seq_idx (B,T):
    the number of each token's text, where there are several in a row."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit).to(dtype).transpose(1, 2)
    q, k, v = (part.to(dtype).transpose(1, 2) for part in (C, B, x))
    q, k = (part.repeat_interleave(v.shape[1] // part.shape[1], 1) for part in (q, k))
    resets = None if seq_idx is None else F.pad(seq_idx.diff(dim=1) != 0, (1, 0))
    before = None if initial_states is None else FastWeightState(initial_states.to(dtype).mT, None, None)
    y, after = fast_weight(
        q, k, v * dt.unsqueeze(-1), "retnet", {"g": (dt * A.to(dtype)[:, None]).exp()}, before, reset_mask=resets
    )
    if D is not None:
        y = y + v * D.to(dtype).view(-1, 1, D.shape[-1] if D.dim() > 1 else 1)
    y = y.transpose(1, 2).contiguous()
    return (y, cast(Tensor, after.memory).mT) if return_final_states else y


def packed_convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: Tensor,
    **unused: Any,
) -> Tensor:
    """The short convolution of hidden states (B,C,T) with weight (C,taps), which does not look into another text. seq_idx (B,T) has
    the number of each token's text."""
    x = hidden_states
    y = x.new_zeros(()) if bias is None else bias[:, None]
    for back in range(weight.shape[1]):
        same = F.pad(seq_idx, (back, 0), value=-1)[:, : x.shape[2]] == seq_idx
        y = y + weight[:, -1 - back, None] * F.pad(x, (back, 0))[:, :, : x.shape[2]].masked_fill(~same[:, None], 0)
    activations = importlib.import_module("transformers.activations").ACT2FN
    return (y if activation is None else activations[activation](y)).to(x.dtype)


def one_by_one(**unused: Any) -> None:
    """Several functions in one: as the reference does, it leaves them to the layer."""


REPLACED: dict[str, Callable[..., Any]] = {  # by the name of the kernel
    "chunk_gated_delta_rule": delta_rule,
    "fused_recurrent_gated_delta_rule": delta_rule,
    "chunk_kda": delta_rule,
    "fused_recurrent_kda": delta_rule,
    "mamba_chunk_scan_combined": mamba2_scan,
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

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(first, args)) | kwargs
        x = next(iter(given.values()))
        limits, numbers = given.get("cu_seqlens"), given.get("seq_idx")
        left = numbers is None and (kernel in PACKED or (own is mamba2_scan and limits is not None))
        if left or torch.compiler.is_exporting() or (has_kernel and x.device.type != "cpu"):
            return original(*args, **kwargs)
        operands = [given.pop(name) for name in first[:5]] if kernel in REPLACED else []
        return own(*operands, **given)

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
    delta rules, Kimi Delta Attention and the scan of Mamba 2, in training and in generation, in models that are there already and
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
        if name in sys.modules and kernel in REPLACED | PACKED:
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
        return lambda function: replacement(kernel, mark(function)) if kernel in REPLACED | PACKED else mark(function)

    decorate.replaces = original  # type: ignore[attr-defined]
    return decorate
