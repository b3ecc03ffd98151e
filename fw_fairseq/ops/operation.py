"""The fast-weight operation.

A call passes through ``checks.check_arguments`` (the rule's name becomes the ``Rule``), ``multistep.spread`` (several writes of a
token become steps), ``with_coefficients`` (the gates become ``Coefficients``), and ``dispatch.run``, which chooses the form and
calls it; ``multistep.run_steps`` is around it for rules that need more than their coefficients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from ..autograd import PLAIN, is_watched, without_autocast
from ..feature_maps import AS_IS, RowMap
from ..rules import RULES, Coefficients
from . import normalisation
from .checks import check_arguments
from .dispatch import mapped, run
from .factored import Factors, no_factors
from .inputs import READ_AND_ERASE, Inputs, fill
from .kernels.launch import launcher_for
from .kernels.parameters import remember
from .multistep import run_steps, spread
from .parallel.packing import run_packed
from .plans import PLANS, find_plan, key_of, run_plan
from .recurrent import looped
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
    group: distributed.ProcessGroup | None = None,
    attention_norm_of: str = READ_AND_ERASE,
    cu_seqlens: Tensor | None = None,
    keep_state: bool = True,
) -> tuple[Tensor, FastWeightState]:
    """Fast weights: a memory of each head that every token first writes into and then reads, in time linear in the tokens.

    With W_t the memory (K,V) after token t, the rule says how k_t and v_t are written into W_{t-1}, and the output is
    y_t = W_t^T q_t. So y_t depends on no later token. Shapes: B sequences, H heads, T tokens, K features of q and k, V channels
    of v. T, K and V are at least 1; B may be 0.

    Args:
        q: (B,H,T,K), queries after the feature map, or (B,H,T,D) with ``feature_map``. float32, bfloat16, float16 or float64,
            with any strides.
        k: keys, in the shape, dtype and device of q. A rule that may write several times for each read, "delta_product", also
            takes n T keys, values and gates: n in a row for each query.
        v: (B,H,T,V), values, in the dtype and on the device of q.
        rule: how a token is written; a name in ``fw_fairseq.rules.RULES``, which has each rule's equation.
        gates: the rule's gates by name, in q's dtype or float32, numbers from 0 to 1 except those that the rule's equation has no
            bound for: up to 2 where the gate erases (negative eigenvalues). A gate is (B,H,T), (B,H,T,K) or (B,H,T,V);
            ``RULES[rule].gates[name].shape((B, H, T, K, V))`` says which.
        state: the state that an earlier call returned; this call continues from it, and gradients flow into it. None starts from
            an empty memory.
        backend: "recurrent" runs one token at a time, "chunkwise" runs matrix products over chunks of tokens, "cuda" runs the
            kernels, and "auto" runs the fastest of these that can run.
        attention_norm: divides y_t by n_t . q_t + eps, where n_t accumulates the keys as the rule does. It is for features that
            are not negative.
        eps: None for 1e-6, or for 1e-30 with ``key_log_scale``: reads relative to the largest key are often smaller than 1e-6.
        padding_mask: (B,T) bool, True at padding. A padded token leaves the state unchanged, and its output is 0.
        key_log_scale: (B,H,T), with ``attention_norm`` only. The keys stand for k exp(key_log_scale), which may be out of the
            range of the dtype; see ``FeatureMap.scaled``.
        reset_mask: (B,T) bool, True at the first token of a new text. The memory is emptied before that token, and neither values
            nor gradients pass it.
        feature_map: a ``RowMap`` that makes features of q and k, both (B,H,T,D). Kernels apply it as they load the rows, so that
            the features are never in the device's memory.
        decoding: says that the tokens come one at a time. With backend "auto" and without kernels, a new state then keeps the
            tokens themselves (``Factors``) as long as they are smaller than the memory.
        group: a ``torch.distributed`` group whose workers hold consecutive parts of the tokens, in the order of their ranks. All
            workers call this at the same time with the same state, each with its part. Each gets y of its part, and the state
            after the last worker's last token. Gradients are those of the sum of all workers' losses.
        attention_norm_of: what ``attention_norm`` divides under rule "delta". "read_and_erase" also divides what an erase reads,
            by n_{t-1} . k_t, as Schlag et al. 2021, eq. 27, do; "read" divides the output alone, as Mao 2022 does.
        cu_seqlens: (N+1), int32 or int64, from 0 to T: B is 1, and the row holds N texts one after the other, text i from token
            cu_seqlens[i] to before cu_seqlens[i + 1]. Each has a memory of its own: B of the states is N, for ``state`` too. A
            text without tokens leaves its state as it is. The numbers are read, which waits for a GPU and ends a compiled graph.
        keep_state: False where no call continues from this one: the state is then None, and kernels do not write it.

    Returns:
        y: (B,H,T,V), in v's dtype.
        state: a ``FastWeightState`` after the last token, in float32 (float64 for float64 inputs).

    Raises:
        ValueError: an argument does not fit; one sentence names it and says what is allowed. With backend "cuda" also where no
            kernel can run.

    Example: the whole sequence at once, and the same in two calls.

        >>> import torch
        >>> from fw_fairseq.ops import fast_weight
        >>> q, k = torch.rand(2, 4, 100, 16).softmax(-1), torch.rand(2, 4, 100, 16).softmax(-1)
        >>> v, beta = torch.randn(2, 4, 100, 32), torch.rand(2, 4, 100)
        >>> y, state = fast_weight(q, k, v, "delta", {"beta": beta})
        >>> y.shape, state.memory.shape
        (torch.Size([2, 4, 100, 32]), torch.Size([2, 4, 16, 32]))
        >>> first, second = slice(0, 60), slice(60, 100)
        >>> y1, s = fast_weight(q[:, :, first], k[:, :, first], v[:, :, first], "delta", {"beta": beta[:, :, first]})
        >>> y2, s = fast_weight(q[:, :, second], k[:, :, second], v[:, :, second], "delta", {"beta": beta[:, :, second]}, s)
        >>> torch.allclose(torch.cat([y1, y2], 2), y, atol=1e-5), torch.allclose(s.memory, state.memory, atol=1e-5)
        (True, True)
    """
    launcher = launcher_for(q) if q.__class__ in PLAIN or isinstance(q, Tensor) else None
    key = None
    if launcher is not None and padding_mask is reset_mask is key_log_scale is group is cu_seqlens is None and not is_watched():
        options = launcher, rule, backend, attention_norm, eps, feature_map, decoding, attention_norm_of, keep_state
        key = key_of(q, k, v, gates, state, options)
    try:
        plan = PLANS[key]
    except (KeyError, TypeError):  # a TypeError for what cannot be hashed, which the checks refuse
        plan = None
    if plan is not None and rule in RULES and plan.rule is RULES[rule]:
        return run_plan(plan, q, k, v, gates or {}, state)
    inputs = check_arguments(
        q, k, v, rule, gates, state, backend, attention_norm, eps, padding_mask, key_log_scale, reset_mask, feature_map, decoding,
        group, attention_norm_of, cu_seqlens, launcher is not None,
    )  # fmt: skip
    if inputs.limits is not None:
        y, state = run_packed(fast_weight, rule, inputs, inputs.limits)
        return returned(y, state, keep_state)
    inputs = inputs._replace(ends=keep_state or group is not None, half=v.dtype == torch.float16)
    if key is not None and (plan is not None or key not in PLANS):
        plan = remember(PLANS, key, find_plan(inputs))
        if plan is not None:
            return run_plan(plan, q, k, v, inputs.gates, state)
    if inputs.row_map != AS_IS and not maps_inside(inputs):
        if padding_mask is not None:  # features of NaN would have a gradient of NaN
            padded = padding_mask.repeat_interleave(k.shape[2] // q.shape[2], 1)
            inputs = inputs._replace(q=fill(q, padding_mask, 0), k=fill(k, padded, 0))
        inputs = mapped(inputs)
    writes = k.shape[2] // q.shape[2]
    if writes > 1:
        inputs = spread(inputs, writes)
    with without_autocast(q.device.type):
        inputs = start(inputs)
        if padding_mask is not None:
            inputs = hide_padding(inputs)
        if inputs.rule.step is not None:
            y, state = run_own_form(inputs)
            return returned(y, state, keep_state)
        inputs = with_coefficients(inputs)
        if attention_norm:
            y, state = normalisation.run_normalised(inputs)
        else:
            y, memory = run(inputs) if inputs.rule.simple else run_steps(inputs)
            state = inputs.state._replace(memory=memory)
    if inputs.padding_mask is not None and inputs.row_map != AS_IS:
        y = fill(y, inputs.padding_mask, 0)
    return returned(y if writes == 1 else y[:, :, writes - 1 :: writes], state, keep_state)


def returned(y: Tensor, state: Any, keep_state: bool) -> tuple[Tensor, Any]:
    """With the state if it is asked for."""
    return y, state if keep_state else None


def maps_inside(inputs: Inputs) -> bool:
    """Whether ``run`` may be given rows before their feature map, because only kernels will see them."""
    sums_keys = inputs.attention_norm and inputs.rule.normaliser == "keys"
    return inputs.kernels and inputs.group is None and inputs.rule.step is None and inputs.rule.simple and not sums_keys


def start(inputs: Inputs) -> Inputs:
    """With the state that the call continues from, an empty one for None. Only one token at a time takes ``Factors``."""
    one_token = inputs.q.shape[2] == 1 and inputs.group is None
    takes_factors = one_token and inputs.rule.step is None and inputs.rule.one_step
    if inputs.state is not None:
        if takes_factors or not isinstance(inputs.state.memory, Factors):
            return inputs
        return inputs._replace(state=inputs.state._replace(memory=inputs.state.memory.dense()))
    sizes = (*inputs.q.shape[:2], inputs.width, inputs.v.shape[3])
    given: Any = {"device": inputs.q.device, "dtype": inputs.dtype}
    factored = takes_factors and inputs.decoding and inputs.backend == "auto" and not inputs.kernels
    empty = inputs.kernels and inputs.group is None and inputs.rule.step is None and inputs.q.shape[2] > 1
    memory: Any
    if factored:
        memory = no_factors(*sizes, **given)
    else:
        memory = torch.zeros((), **given).expand(sizes) if empty else torch.zeros(sizes, **given)
    return inputs._replace(
        empty=empty,
        state=FastWeightState(
            memory,
            torch.zeros(sizes[:3], **given) if inputs.attention_norm else None,
            None if inputs.key_log_scale is None else torch.full(sizes[:2], -torch.inf, **given),
        ),
    )


def hide_padding(inputs: Inputs) -> Inputs:
    """At padding q, k and v are 0 and every gate is 1, whatever was there."""
    mask, scale = inputs.padding_mask, inputs.key_log_scale
    assert mask is not None
    q, k, v = (fill(x, mask, 0) for x in (inputs.q, inputs.k, inputs.v))
    gates = {name: fill(gate, mask, 1) for name, gate in inputs.gates.items()}
    scale = None if scale is None else fill(scale, mask, -torch.inf)
    return inputs._replace(q=q, k=k, v=v, gates=gates, key_log_scale=scale)


def with_coefficients(inputs: Inputs) -> Inputs:
    """The rule's coefficients of the gates. At padding nothing decays, is erased or written; at a reset nothing is left. A key of 0
    neither writes nor erases, but a feature map may make something else of 0: there e and w are 0 too."""
    gates = {name: gate.to(inputs.dtype) for name, gate in inputs.gates.items()}
    assert inputs.rule.coefficients is not None
    f, z, e, w = inputs.rule.coefficients(**gates)
    if inputs.rule.query is not None:
        inputs = inputs._replace(q=inputs.rule.query(inputs.q, inputs.k, **gates))
    if inputs.rule.key is not None:
        inputs = inputs._replace(k=inputs.rule.key(inputs.k, **gates))
    padding, resets = inputs.padding_mask, inputs.reset_mask
    if padding is not None or resets is not None:
        ones = torch.ones(inputs.q.shape[:3], device=inputs.q.device, dtype=inputs.dtype)
        if padding is not None:
            f, z = (None if x is None else fill(x, padding, 1) for x in (f, z))
            if inputs.row_map != AS_IS:
                e, w = None if e is None else fill(e, padding, 0), fill(ones if w is None else w, padding, 0)
        if resets is not None:
            f = fill(ones if f is None else f, resets, 0)
    return inputs._replace(coefficients=Coefficients(f, z, e, w))


def run_own_form(inputs: Inputs) -> tuple[Tensor, FastWeightState]:
    """The result of a rule outside the recurrence, by its ``sequence`` or its ``step``."""
    q, k, v, rule, state = inputs.q, inputs.k, inputs.v, inputs.rule, inputs.state
    masks = inputs.padding_mask, inputs.reset_mask
    stepwise = rule.sequence is None or inputs.backend == "recurrent" or q.shape[2] == 1
    y, memory = looped(rule, stepwise, q, k, v, inputs.gates, state.memory, *masks)
    return y, state._replace(memory=memory)
