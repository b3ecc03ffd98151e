"""The fast-weight operation: it checks its inputs, continues from a state, applies masks and normalises."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..row_map import AS_IS, RowMap
from ..rules import Rule
from . import checks, masks, normalisation
from .dispatch import has_kernels, run_form
from .factored import Factors, no_factors
from .parallel.workers import largest_scales, run_across, sum_keys_across
from .recurrent import scan, step_form
from .state import FastWeightState


def fast_weight(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: str = "delta",
    gates: dict[str, Tensor] | None = None,
    state: FastWeightState | None = None,
    backend: str = "auto",
    attention_norm: bool = False,
    eps: float | None = None,
    padding_mask: Tensor | None = None,
    key_log_scale: Tensor | None = None,
    reset_mask: Tensor | None = None,
    feature_map: RowMap | None = None,
    decoding: bool = False,
    group=None,
) -> tuple[Tensor, FastWeightState]:
    """Writes keys and values into a fast-weight memory over time and reads it with the queries; causal, linear in T.

    Args:
        q, k: (B,H,T,K) after the feature map; v: (B,H,T,V). fp32, bf16, fp16 or float64, any strides.
        rule: a name in ``fw_fairseq.rules.RULES``.
        gates: the rule's gates by name, probabilities, (B,H,T), (B,H,T,K) or (B,H,T,V); in q's dtype or fp32.
        state: what an earlier call returned, to go on from there; gradients flow through it.
        backend: "recurrent" one token at a time, "chunkwise" matrix products, "cuda" the kernels, "auto" the best that runs.
        attention_norm: divides y_t by n_t . q_t + eps, n_t the accumulated keys. For non-negative feature maps.
        eps: None for 1e-6, or with key_log_scale for 1e-30: reads relative to the largest key are often smaller than 1e-6.
        padding_mask: (B,T), True at padding: such a step leaves the state as it is and outputs 0.
        reset_mask: (B,T), True where the memory is emptied before the step, at the first token of a new text. Nothing passes it.
        key_log_scale: (B,H,T): the keys stand for k exp(key_log_scale); see ``FeatureMap.scaled``. With attention_norm only.
        feature_map: q and k are (B,H,T,D), and this makes features of them; kernels do it as they load them, so that features
            are never in memory.
        decoding: the tokens come one at a time; with backend "auto" and no kernel the state then starts as ``Factors`` of the
            memory and becomes the memory when that is no larger.
        group: a ``torch.distributed`` group whose workers hold consecutive parts of the tokens, in the order of their ranks. All
            call this at the same time, each with its part and all with the same state, and get their part of y and the state after
            the last worker's last token. Gradients are those of the sum of all workers' losses.

    Returns:
        y (B,H,T,V) in v's dtype, and the state after the last token, accumulated in fp32 (float64 for float64 inputs).
    """
    if eps is None:
        eps = normalisation.EPS if key_log_scale is None else normalisation.SCALED_EPS
    spec = checks.check_call(rule, q, k, v, backend, attention_norm, eps, key_log_scale, padding_mask, reset_mask, feature_map)
    row_map = AS_IS if feature_map is None else feature_map
    if group is not None:
        checks.check_group(group, rule, spec)
    if group is not None or not kernels_may_map(spec, q, backend, attention_norm):
        q, k, row_map = row_map(q), row_map(k), AS_IS
    shape = (*q.shape[:3], row_map.width(q.shape[3]), v.shape[3])
    gates = checks.check_gates(rule, spec, gates, q, shape)
    one = q.shape[2] == 1 and group is None
    factored = one and decoding and backend == "auto" and spec.coefficients is not None and not has_kernels(q)
    state = start(state, q, shape, attention_norm, key_log_scale is not None, one, factored)
    if padding_mask is not None:
        q, k, v = (masks.at(padding_mask, x, 0) for x in (q, k, v))
        gates = {name: masks.at(padding_mask, gate, 1) for name, gate in gates.items()}
    with torch.autocast(q.device.type, enabled=False):
        gates = {name: gate.to(state.memory.dtype) for name, gate in gates.items()}
        if spec.step is not None:
            y, memory = own_form(spec, backend, q, k, v, gates, state.memory, padding_mask, reset_mask)
            return y, state._replace(memory=memory)
        coefficients = spec.coefficients(**gates)
        if padding_mask is not None:
            coefficients = masks.pause(coefficients, padding_mask, q, row_map)
            key_log_scale = masks.at(padding_mask, key_log_scale, -torch.inf)
        if reset_mask is not None:
            coefficients = masks.forget(coefficients, reset_mask, q)
        run = functools.partial(run_form, backend, row_map)
        if group is not None:
            run = functools.partial(run_across, group, run)
        if attention_norm:
            y, state = normalised(run, q, k, v, coefficients, state, spec, eps, key_log_scale, reset_mask, group)
        else:
            y, memory = run(q, k, v, coefficients, state.memory)
            state = state._replace(memory=memory)
        if padding_mask is not None and row_map != AS_IS:
            y = masks.at(padding_mask, y, 0)
        return y, state


def start(
    state: FastWeightState | None, q: Tensor, shape, attention_norm: bool, scaled: bool, one: bool, factored: bool
) -> FastWeightState:
    """The state to go on from, an empty one for None, as ``Factors`` if factored; those take one token at a time."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    if state is None:
        return empty_state(shape, q.device, dtype, attention_norm, scaled, factored)
    checks.check_state(state, q, shape, dtype, attention_norm, scaled)
    if isinstance(state.memory, Factors) and not one:
        return state._replace(memory=state.memory.dense())
    return state


def kernels_may_map(spec: Rule, q: Tensor, backend: str, attention_norm: bool) -> bool:
    """Whether only kernels will see q and k."""
    sums_keys = attention_norm and spec.normaliser == "keys"
    return backend in ("auto", "cuda") and has_kernels(q) and spec.step is None and not sums_keys


def normalised(
    run, q, k, v, coefficients, state, spec: Rule, eps: float, key_log_scale, reset_mask, group
) -> tuple[Tensor, FastWeightState]:
    if spec.normaliser == "keys":
        sum_keys = normalisation.sum_keys if group is None else functools.partial(sum_keys_across, group)
        read, recalled, normaliser = sum_keys(q, k, state.normaliser, reset_mask)
        coefficients = normalisation.normalise_erase(coefficients, recalled, eps)
        y, memory = run(q, k, v.to(state.memory.dtype), coefficients, state.memory)
        return normalisation.divide(y, read.unsqueeze(-1), eps).to(v.dtype), FastWeightState(memory, normaliser)
    log_scale = state.log_scale
    if key_log_scale is not None:
        key_log_scale, last = key_log_scale.to(log_scale.dtype), None
        left = normalisation.log_left(coefficients.f, key_log_scale, reset_mask)
        if group is not None:
            log_scale, last = largest_scales(group, key_log_scale, log_scale, left)
        coefficients, log_scale = normalisation.rescale_writes(coefficients, key_log_scale, log_scale, left)
        log_scale = log_scale if last is None else last
    if q.shape[2] == 1 and group is None and not has_kernels(q):  # a column would copy the memory for one token
        one = torch.ones_like(v[..., :1], dtype=state.memory.dtype)
        read, normaliser = step_form(q, k, one, coefficients, state.normaliser.unsqueeze(-1))
        y, memory = run(q, k, v.to(state.memory.dtype), coefficients, state.memory)
        return normalisation.divide(y, read, eps).to(v.dtype), FastWeightState(memory, normaliser.squeeze(-1), log_scale)
    columns, memory = normalisation.append_column(v, state)
    y, memory = run(q, k, columns, coefficients, memory)
    y, memory, normaliser = normalisation.split_column(y, memory, eps)
    return y.to(v.dtype), FastWeightState(memory, normaliser, log_scale)


def empty_state(
    shape, device, dtype: torch.dtype, attention_norm: bool, log_scale: bool, factored: bool = False
) -> FastWeightState:
    """The state before the first token, for shape (B, H, T, K, V)."""
    batch, heads, _, key_width, value_width = shape
    zeros = no_factors if factored else torch.zeros
    memory = zeros(batch, heads, key_width, value_width, device=device, dtype=dtype)
    normaliser = torch.zeros(batch, heads, key_width, device=device, dtype=dtype) if attention_norm else None
    scale = torch.full((batch, heads), -torch.inf, device=device, dtype=dtype) if log_scale else None
    return FastWeightState(memory, normaliser, scale)


def own_form(spec: Rule, backend: str, q, k, v, gates, memory, padding_mask, reset_mask) -> tuple[Tensor, Tensor]:
    """Of a rule outside the recurrence."""
    if spec.sequence is None or backend == "recurrent" or q.shape[2] == 1:
        return scan(spec.step, q, k, v, gates, memory, padding_mask, reset_mask)
    y, memory = spec.sequence(*(x.to(memory.dtype) for x in (q, k, v)), memory, padding_mask, reset_mask, **gates)
    return y.to(v.dtype), memory
