"""The one place where the public op looks at its arguments. Every mistake is a ValueError that names the argument, what it is
and what is allowed."""

from __future__ import annotations

import math

import torch
from torch import Tensor, distributed

from ..errors import Mistake
from ..feature_maps import AS_IS, NORMS, ROW_MAPS, RowMap
from ..rules import RULES, Rule
from .factored import Factors
from .inputs import READ, READ_AND_ERASE, Inputs
from .normalisation import EPS, SCALED_EPS
from .state import FastWeightState

BACKENDS = ("auto", "recurrent", "chunkwise", "cuda")
NORM_OF = (READ_AND_ERASE, READ)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_arguments(
    q, k, v, rule, gates, state, backend, attention_norm, eps, padding_mask, key_log_scale, reset_mask, feature_map, decoding,
    group, attention_norm_of,
) -> Inputs:  # fmt: skip
    """The arguments of ``fast_weight`` as ``Inputs``, or one sentence about the first that does not fit."""
    check_choice("rule", rule, RULES)
    spec = RULES[rule]
    check_tensors(q, k, v, spec.several)
    check_choice("backend", backend, BACKENDS)
    missing = missing_form(spec, backend)
    if missing is not None:
        raise Mistake(f"rule {rule!r} has no {missing}; use backend='auto' or 'recurrent'")
    for name, flag in (("attention_norm", attention_norm), ("decoding", decoding)):
        if not isinstance(flag, bool):
            raise Mistake(f"{name} is a {type(flag).__name__}; it must be True or False")
    check_norm_of(attention_norm_of, attention_norm, spec)
    if feature_map is not None:
        check_feature_map(feature_map, q)
    if eps is None:
        eps = EPS if key_log_scale is None else SCALED_EPS
    if type(eps) not in (int, float) or not 0 < eps < math.inf:
        is_ = repr(eps) if isinstance(eps, (int, float)) else f"a {type(eps).__name__}"
        raise Mistake(f"eps is {is_}; it must be a finite number above 0, or None")
    if attention_norm:
        check_attention_norm(rule, spec)
    if key_log_scale is not None:
        check_key_log_scale(key_log_scale, rule, spec, attention_norm, q)
    check_masks(padding_mask, reset_mask, (q.shape[0], q.shape[2]), q.device)
    if group is not None:
        check_group(group, rule, spec)
    row_map, gates = AS_IS if feature_map is None else feature_map, {} if gates is None else gates
    inputs = Inputs(
        q, k, v, spec, gates, state, backend, attention_norm, eps, padding_mask, key_log_scale, reset_mask, row_map, decoding,
        group, attention_norm_of,
    )  # fmt: skip
    sizes = (*k.shape[:3], *inputs.sizes[3:])
    check_gates(rule, spec, gates, q, sizes)
    if state is not None:
        check_state(state, q, sizes, inputs.dtype, attention_norm, key_log_scale is not None)
    return inputs


def missing_form(rule: Rule, backend: str) -> str | None:
    """Returns the form that a rule outside the recurrence lacks for this backend, or None."""
    if backend == "cuda" and rule.step is not None:
        return "kernel"
    return "chunk form" if backend == "chunkwise" and rule.step is not None and rule.sequence is None else None


def check_choice(name: str, value, allowed) -> None:
    if not isinstance(value, str) or value not in allowed:
        is_ = repr(value) if isinstance(value, str) else f"a {type(value).__name__}"
        raise Mistake(f"{name} is {is_}; allowed: {', '.join(allowed)}")


def check_tensors(q: Tensor, k: Tensor, v: Tensor, several: bool) -> None:
    """Shapes, dtypes and devices. ``several``: there may be n keys and values for each query."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise Mistake(f"{name} is a {type(x).__name__}; it must be a torch.Tensor")
        check_dense(name, x)
        if x.dim() != 4:
            raise Mistake(f"{name} has shape {tuple(x.shape)}; it must have 4 dimensions, (B,H,T,{'V' if name == 'v' else 'K'})")
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
    if q.shape[3] == 0 or v.shape[3] == 0:
        raise Mistake(f"q has shape {tuple(q.shape)} and v {tuple(v.shape)}; K and V must be at least 1")


def check_dense(name: str, x: Tensor) -> None:
    """Refuses a tensor whose numbers are not all in memory, such as a sparse one."""
    if x.layout != torch.strided:
        raise Mistake(f"{name} has layout {x.layout}; it must be a dense tensor, as x.to_dense() gives")


def check_sequences(state: Tensor, count: int) -> None:
    """Refuses a state, of which one part is given, that is not of as many sequences as the tokens."""
    if state.shape[0] != count:
        raise Mistake(f"state is of {state.shape[0]} sequences and the tokens of {count}; they must be as many")


def check_tokens(name: str, x: Tensor, tokens: int) -> None:
    """The contract of every operation and mixer over time: there is at least one token. A batch may be empty."""
    if tokens == 0:
        raise Mistake(f"{name} has shape {tuple(x.shape)}; T must be at least 1")


def check_feature_map(feature_map, q: Tensor) -> None:
    if not isinstance(feature_map, RowMap):
        raise Mistake(f"feature_map is a {type(feature_map).__name__}; it must be None or a RowMap")
    name, nu, norm = feature_map
    if name not in tuple(ROW_MAPS) or norm not in tuple(NORMS):
        raise Mistake(f"feature_map is {feature_map}; allowed: name {', '.join(ROW_MAPS)}, norm {', '.join(NORMS)}")
    if name == "identity" and norm == "sum":
        raise Mistake("feature_map has norm 'sum' with name 'identity', which can be negative; use norm 'l2'")
    if name == "dpfp" and not (type(nu) is int and 1 <= nu < 2 * q.shape[3]):
        raise Mistake(f"feature_map has nu {nu}; it must be from 1 to 2 * D - 1 = {2 * q.shape[3] - 1}")


def check_gates(rule_name: str, rule: Rule, gates, q: Tensor, sizes: tuple[int, ...]) -> None:
    """For sizes (B, H, T, K, V)."""
    if not isinstance(gates, dict):
        raise Mistake(f"gates is a {type(gates).__name__}; it must be a dict of tensors by the names of the rule's gates")
    if set(gates) != set(rule.gates):
        wanted = ", ".join(rule.gates) or "none"
        raise Mistake(f"gates has {', '.join(map(str, gates)) or 'none'}; rule {rule_name!r} takes exactly: {wanted}")
    for name, gate in gates.items():
        shape, axis = rule.gates[name].shape(sizes), rule.gates[name].axis
        if not isinstance(gate, Tensor) or gate.shape != shape:
            is_ = f"has shape {tuple(gate.shape)}" if isinstance(gate, Tensor) else f"is a {type(gate).__name__}"
            raise Mistake(f"gates[{name!r}] {is_}; it must be a tensor of shape (B,H,T{',' + axis if axis else ''}) = {shape}")
        check_dense(f"gates[{name!r}]", gate)
        if gate.device != q.device or gate.dtype not in (q.dtype, torch.float32):
            raise Mistake(f"gates[{name!r}] is {gate.dtype} on {gate.device}; allowed: {q.dtype} or float32, on {q.device}")


def check_state(state, q: Tensor, sizes: tuple[int, ...], dtype: torch.dtype, normaliser: bool, log_scale: bool) -> None:
    """For sizes (B, H, T, K, V), a state to go on from: what an earlier call with the same rule, widths and options returned."""
    if not isinstance(state, FastWeightState):
        raise Mistake(f"state is a {type(state).__name__}; it must be None or the state that an earlier call returned")
    shape = (*sizes[:2], *sizes[3:])
    wanted = {"memory": shape, "normaliser": shape[:3] if normaliser else None, "log_scale": shape[:2] if log_scale else None}
    for name, want in wanted.items():
        x = getattr(state, name)
        if isinstance(x, Tensor):
            check_dense(f"state.{name}", x)
        elif x is not None and not (name == "memory" and isinstance(x, Factors)):
            raise Mistake(f"state.{name} is a {type(x).__name__}; it must be a tensor, as an earlier call returned it")
        got = None if x is None else tuple(x.shape)
        if got != want:
            raise Mistake(f"state.{name} has shape {got}; with these inputs and options it must be {want}")
        if x is not None and (x.dtype != dtype or x.device != q.device):
            raise Mistake(f"state.{name} is {x.dtype} on {x.device}; it must be {dtype} on {q.device}")


def check_masks(padding_mask, reset_mask, shape: tuple[int, int], device: torch.device) -> None:
    """The contract of every operation and mixer: a mask is None or says one thing of each token. ``shape``: (B, T)."""
    for name, mask, meaning in (
        ("padding_mask", padding_mask, "at padding"),
        ("reset_mask", reset_mask, "where a new text begins"),
    ):
        if mask is None:
            continue
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != shape:
            is_ = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
            raise Mistake(f"{name} is {is_}; it must be a bool tensor of shape (B,T) = {shape}, True {meaning}")
        check_dense(name, mask)
        if mask.device != device:
            raise Mistake(f"{name} is on {mask.device}; it must be on {device} like the tokens")


def check_attention_norm(rule_name: str, rule: Rule) -> None:
    if rule.normaliser is None:
        able = ", ".join(name for name, r in RULES.items() if r.normaliser)
        raise Mistake(f"attention_norm=True is not defined for rule {rule_name!r}; it is for: {able}")
    if rule.normaliser == "write" and (rule.sample.z is not None or (rule.sample.w is not None and rule.sample.w.dim() == 4)):
        raise Mistake(
            f"attention_norm=True is not defined for rule {rule_name!r}, whose z or w differs between value channels; its"
            " normaliser, which has no channels, must be 'keys' or None"
        )


def check_norm_of(norm_of, attention_norm: bool, rule: Rule) -> None:
    check_choice("attention_norm_of", norm_of, NORM_OF)
    if norm_of != READ_AND_ERASE and not (attention_norm and rule.normaliser == "keys"):
        able = ", ".join(name for name, r in RULES.items() if r.normaliser == "keys")
        raise Mistake(f"attention_norm_of is {norm_of!r}; that is for attention_norm=True and a rule that divides an erase: {able}")


def check_group(group, rule_name: str, rule: Rule) -> None:
    if not distributed.is_available() or not isinstance(group, distributed.ProcessGroup):
        raise Mistake(
            f"group is a {type(group).__name__}; it must be None or a torch.distributed.ProcessGroup that this worker is in"
        )
    if rule.coefficients is None:
        raise Mistake(f"rule {rule_name!r} has steps of its own, which workers cannot take apart; use another, or group=None")


def check_key_log_scale(key_log_scale, rule_name: str, rule: Rule, attention_norm: bool, q: Tensor) -> None:
    if not attention_norm or rule.normaliser != "write":
        able = ", ".join(name for name, r in RULES.items() if r.normaliser == "write")
        raise Mistake(
            f"key_log_scale needs attention_norm=True and one of the rules {able} (a common scale of the keys cancels there);"
            f" got attention_norm={attention_norm}, rule {rule_name!r}"
        )
    if not isinstance(key_log_scale, Tensor) or key_log_scale.shape != q.shape[:3]:
        is_ = tuple(key_log_scale.shape) if isinstance(key_log_scale, Tensor) else type(key_log_scale).__name__
        raise Mistake(f"key_log_scale is {is_}; it must be a tensor of shape (B,H,T) = {tuple(q.shape[:3])}")
    check_dense("key_log_scale", key_log_scale)
    if not key_log_scale.is_floating_point():
        raise Mistake(f"key_log_scale is {key_log_scale.dtype}; it must hold floating-point numbers")
