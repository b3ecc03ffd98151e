"""The fast-weight operation: it checks its inputs, continues from a state, applies masks and normalises."""

from __future__ import annotations

import torch
from torch import Tensor

from ..row_map import AS_IS, RowMap
from . import checks, normalisation
from .dispatch import has_kernels, maps_inside, run
from .factored import Factors
from .inputs import Inputs, fill, hide_padding, with_coefficients
from .recurrent import scan
from .state import FastWeightState, empty_state


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
    inputs = checks.check_arguments(
        q, k, v, rule, gates, state, backend, attention_norm, eps, padding_mask, key_log_scale, reset_mask, feature_map, decoding,
        group,
    )  # fmt: skip
    if not maps_inside(inputs):
        inputs = inputs.mapped()
    with torch.autocast(q.device.type, enabled=False):
        inputs = hide_padding(start(inputs))
        if inputs.rule.step is not None:
            return run_own_form(inputs)
        inputs = with_coefficients(inputs)
        if attention_norm:
            ready, sums = normalisation.start(inputs)
            y, memory = run(ready)
            y, state = normalisation.finish(y, memory, sums, inputs)
        else:
            y, memory = run(inputs)
            state = inputs.state._replace(memory=memory)
    if padding_mask is not None and inputs.row_map != AS_IS:
        y = fill(y, padding_mask, 0)
    return y, state


def start(inputs: Inputs) -> Inputs:
    """With the state that the call continues from, an empty one for None. Only one token at a time takes ``Factors``."""
    one_token = inputs.q.shape[2] == 1 and inputs.group is None
    if inputs.state is not None:
        if one_token or not isinstance(inputs.state.memory, Factors):
            return inputs
        return inputs._replace(state=inputs.state._replace(memory=inputs.state.memory.dense()))
    factored = inputs.decoding and one_token and inputs.backend == "auto" and inputs.rule.step is None
    factored = factored and not has_kernels(inputs.q)
    scaled = inputs.key_log_scale is not None
    return inputs._replace(state=empty_state(inputs.sizes, inputs.q.device, inputs.dtype, inputs.attention_norm, scaled, factored))


def run_own_form(inputs: Inputs) -> tuple[Tensor, FastWeightState]:
    """The result of a rule outside the recurrence, by its ``sequence`` or its ``step``."""
    q, k, v, rule, state = inputs.q, inputs.k, inputs.v, inputs.rule, inputs.state
    masks = inputs.padding_mask, inputs.reset_mask
    if rule.sequence is None or inputs.backend == "recurrent" or q.shape[2] == 1:
        y, memory = scan(rule.step, q, k, v, inputs.gates, state.memory, *masks)
    else:
        q, k, values, *gates = (x.to(state.memory.dtype) for x in (q, k, v, *inputs.gates.values()))
        y, memory = rule.sequence(q, k, values, state.memory, *masks, **dict(zip(inputs.gates, gates)))
    return y.to(v.dtype), state._replace(memory=memory)
