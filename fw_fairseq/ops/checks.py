"""The one place where the public operation looks at its arguments. Every mistake is a ValueError that names the argument, what it
is and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ..errors import Mistake
from ..feature_maps import AS_IS, RowMap
from ..rules import RULES, Rule
from .inputs import READ, READ_AND_ERASE, Inputs
from .normalisation import EPS, SCALED_EPS
from .state import FastWeightState

BACKENDS = ("auto", "recurrent", "chunkwise", "cuda")
NORM_OF = (READ_AND_ERASE, READ)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_arguments(
    q: Tensor, k: Tensor, v: Tensor, rule: str, gates: dict[str, Tensor] | None, state: FastWeightState | None, backend: str,
    attention_norm: bool, eps: float | None, padding_mask: Tensor | None, key_log_scale: Tensor | None, reset_mask: Tensor | None,
    feature_map: RowMap | None, decoding: bool, group: Any, attention_norm_of: str, cu_seqlens: Tensor | None, on_device: bool,
) -> Inputs:  # fmt: skip
    """The arguments of ``fast_weight`` as ``Inputs``, or one sentence about the first that does not fit. on_device: whether q is
    where kernels run."""
    check_choice("rule", rule, RULES)
    spec = RULES[rule]
    check_tensors(q, k, v, spec.several)
    check_choice("backend", backend, BACKENDS)
    missing = missing_form(spec, backend)
    if missing is not None:
        raise Mistake(f"rule {rule!r} has no {missing}; use backend='auto' or 'recurrent'")
    check_choice("attention_norm_of", attention_norm_of, NORM_OF)
    row_map, gates = AS_IS if feature_map is None else feature_map, {} if gates is None else gates
    if feature_map is not None:
        check_feature_map(feature_map, q)
    if eps is None:
        eps = EPS if key_log_scale is None else SCALED_EPS
    if not 0 < eps < math.inf:
        raise Mistake(f"eps is {eps!r}; it must be a finite number above 0, or None")
    check_norm(rule, spec, attention_norm, attention_norm_of, key_log_scale, q)
    check_masks(padding_mask, reset_mask, (q.shape[0], q.shape[2]))
    if group is not None and spec.coefficients is None:
        raise Mistake(f"rule {rule!r} has steps of its own, which workers cannot take apart; use another, or group=None")
    width = q.shape[3] if row_map == AS_IS else row_map.width(q.shape[3])
    sizes = (*k.shape[:3], width, v.shape[3])
    check_gates(rule, spec, gates, q, sizes)
    limits = None if cu_seqlens is None else check_limits(cu_seqlens, q, group)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if state is not None:
        texts = sizes if limits is None else (len(limits) - 1, *sizes[1:])
        check_state(state, q, texts, dtype, attention_norm, key_log_scale is not None)
    kernels = backend == "cuda" or (backend == "auto" and on_device)
    return Inputs(
        q, k, v, spec, gates, state, backend, attention_norm, eps, padding_mask, key_log_scale, reset_mask,
        row_map, width, decoding, group, attention_norm_of, dtype, kernels, limits=limits,
    )  # fmt: skip


def missing_form(rule: Rule, backend: str) -> str | None:
    """Returns the form that a rule outside the recurrence lacks for this backend, or None."""
    if backend == "cuda" and rule.step is not None:
        return "kernel"
    return "chunk form" if backend == "chunkwise" and rule.step is not None and rule.sequence is None else None


def check_choice(name: str, value: str, allowed: Collection[str]) -> None:
    """Refuses a name that is not among those allowed."""
    if value not in allowed:
        is_ = repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
        raise Mistake(f"{name} is {is_}; allowed: {', '.join(allowed)}")


def check_tensors(q: Tensor, k: Tensor, v: Tensor, several: bool) -> None:
    """Shapes, dtypes and devices. ``several``: there may be n keys and values for each query."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or x.dim() != 4:
            is_ = f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
            raise Mistake(f"{name} {is_}; it must be a tensor of 4 dimensions, (B,H,T,{'V' if name == 'v' else 'K'})")
        if x.dtype not in DTYPES:
            raise Mistake(f"{name} has dtype {x.dtype}; allowed: {', '.join(map(str, DTYPES))}")
        if x.dtype != q.dtype or x.device != q.device:
            raise Mistake(f"{name} is {x.dtype} on {x.device} but q is {q.dtype} on {q.device}; they must agree")
    writes = k.shape[2] // max(q.shape[2], 1) if several else 1
    if k.shape != (*q.shape[:2], writes * q.shape[2], q.shape[3]):
        must = "k must be (B,H,n T,K) for q of (B,H,T,K)" if several else "both must be (B,H,T,K)"
        raise Mistake(f"k has shape {tuple(k.shape)} but q {tuple(q.shape)}; {must}")
    if v.shape[:3] != k.shape[:3]:
        other = f"k {tuple(k.shape)}" if several else f"q {tuple(q.shape)}"
        raise Mistake(f"v has shape {tuple(v.shape)} but {other}; B, H and T must agree")
    for name, x in (("q", q), ("k", k)):
        check_tokens(name, x, x.shape[2])


def check_sequences(state: Tensor, count: int) -> None:
    """Refuses a state, of which one part is given, that is not of as many sequences as the tokens."""
    if state.shape[0] != count:
        raise Mistake(f"state is of {state.shape[0]} sequences and the tokens of {count}; they must be as many")


def check_tokens(name: str, x: Tensor, tokens: int) -> None:
    """The contract of every operation and mixer over time: there is at least one token. A batch may be empty."""
    if tokens == 0:
        raise Mistake(f"{name} has shape {tuple(x.shape)}; T must be at least 1")


def check_feature_map(feature_map: RowMap, q: Tensor) -> None:
    """Refuses what no kernel would notice."""
    name, nu, norm = feature_map
    if name == "identity" and norm == "sum":
        raise Mistake("feature_map has norm 'sum' with name 'identity', which can be negative; use norm 'l2'")
    if name == "dpfp" and not 1 <= nu < 2 * q.shape[3]:
        raise Mistake(f"feature_map has nu {nu}; it must be from 1 to 2 * D - 1 = {2 * q.shape[3] - 1}")


def check_gates(rule_name: str, rule: Rule, gates: dict[str, Tensor], q: Tensor, sizes: tuple[int, ...]) -> None:
    """For sizes (B, H, T, K, V)."""
    if gates.keys() != rule.gates.keys():
        wanted = ", ".join(rule.gates) or "none"
        raise Mistake(f"gates has {', '.join(map(str, gates)) or 'none'}; rule {rule_name!r} takes exactly: {wanted}")
    for name, gate in gates.items():
        axis = rule.gates[name].axis
        shape = sizes[:3] if axis is None else (*sizes[:3], sizes[3 if axis == "K" else 4])
        if not isinstance(gate, Tensor) or gate.shape != shape:
            is_ = f"has shape {tuple(gate.shape)}" if isinstance(gate, Tensor) else f"is a {type(gate).__name__}"
            raise Mistake(f"gates[{name!r}] {is_}; it must be a tensor of shape (B,H,T{',' + axis if axis else ''}) = {shape}")
        if gate.device != q.device or gate.dtype not in (q.dtype, torch.float32):
            raise Mistake(f"gates[{name!r}] is {gate.dtype} on {gate.device}; allowed: {q.dtype} or float32, on {q.device}")


def check_state(
    state: FastWeightState, q: Tensor, sizes: tuple[int, ...], dtype: torch.dtype, normaliser: bool, log_scale: bool
) -> None:
    """For sizes (B, H, T, K, V), a state to go on from: what an earlier call with the same rule, widths and options returned."""
    if not isinstance(state, FastWeightState):
        raise Mistake(f"state is a {type(state).__name__}; it must be None or the state that an earlier call returned")
    shape = (*sizes[:2], *sizes[3:])
    wanted = {"memory": shape, "normaliser": shape[:3] if normaliser else None, "log_scale": shape[:2] if log_scale else None}
    for name, want in wanted.items():
        x = getattr(state, name)
        got = None if x is None else tuple(x.shape)
        if got != want:
            raise Mistake(f"state.{name} has shape {got}; with these inputs and options it must be {want}")
        if x is not None and (x.dtype != dtype or x.device != q.device):
            raise Mistake(f"state.{name} is {x.dtype} on {x.device}; it must be {dtype} on {q.device}")


def check_masks(padding_mask: Tensor | None, reset_mask: Tensor | None, shape: tuple[int, int]) -> None:
    """The contract of every operation and mixer: a mask is None or says one thing of each token. ``shape``: (B, T)."""
    for name, mask, meaning in (
        ("padding_mask", padding_mask, "at padding"),
        ("reset_mask", reset_mask, "where a new text begins"),
    ):
        if mask is not None and (not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != shape):
            is_ = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise Mistake(f"{name} is {is_}; it must be a bool tensor of shape (B,T) = {shape}, True {meaning}")


def check_limits(cu_seqlens: Tensor, q: Tensor, group: Any) -> list[int]:
    """Where packed texts begin and end, once they are known to fill a row."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        is_ = f"{cu_seqlens.dtype} {tuple(cu_seqlens.shape)}" if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise Mistake(f"cu_seqlens is {is_}; it must be an int32 or int64 tensor of N + 1 numbers, where N texts begin and end")
    if q.shape[0] != 1 or group is not None:
        rows = f"B is {q.shape[0]}" if group is None else "group is given"
        raise Mistake(f"cu_seqlens divides one row, and {rows}; B must be 1 and group None")
    limits = cu_seqlens.tolist()
    if limits[:1] != [0] or limits[-1] != q.shape[2] or limits != sorted(limits) or len(limits) == 1:
        raise Mistake(f"cu_seqlens goes from {limits[:1]} to {limits[-1:]}; it must rise from 0 to T = {q.shape[2]}")
    return limits


def check_norm(rule_name: str, rule: Rule, norm: bool, norm_of: str, key_log_scale: Tensor | None, q: Tensor) -> None:
    """Attention normalisation is for some rules, and two arguments are for it."""
    able = {kind: ", ".join(name for name, r in RULES.items() if r.normaliser == kind) for kind in ("write", "keys")}
    if norm and rule.normaliser is None:
        raise Mistake(f"attention_norm=True is not defined for rule {rule_name!r}; it is for: {', '.join(able.values())}")
    if norm_of != READ_AND_ERASE and not (norm and rule.normaliser == "keys"):
        raise Mistake(
            f"attention_norm_of is {norm_of!r}; that is for attention_norm=True and a rule that divides an erase: {able['keys']}"
        )
    if key_log_scale is None:
        return
    if not norm or rule.normaliser != "write":
        raise Mistake(
            f"key_log_scale needs attention_norm=True and one of the rules {able['write']} (a common scale of the keys cancels"
            f" there); got attention_norm={norm}, rule {rule_name!r}"
        )
    if key_log_scale.shape != q.shape[:3]:
        raise Mistake(f"key_log_scale is {tuple(key_log_scale.shape)}; it must be a tensor of shape (B,H,T) = {tuple(q.shape[:3])}")
