"""The recurrence one token at a time: the definition that every other form is tested against.

It takes any floating dtype, float64 included. Gradients are plain autograd, so a long sequence keeps one memory per step.

``torch.compile`` would unroll a loop, and take minutes for 16 tokens. For it several tokens are one operator, ``loop``, which runs
this file's loop, or that of a rule with a form of its own; its backward runs it again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..autograd import EVERYWHERE, as_written, call, is_compiling, register
from ..rules import RULES, Coefficients, Rule


def step(
    memory: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor | None = None,
    z: Tensor | None = None,
    e: Tensor | None = None,
    w: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One token: q, k (B,H,K), v (B,H,V), memory (B,H,K,V) -> y (B,H,V), the new memory. e (B,H) is the strength of an erase,
    and e (B,H,K) the key that it reads with."""
    if f is not None:
        memory = memory * (f[..., None, None] if f.dim() < k.dim() else f[..., None])
    if z is not None:
        memory = memory * z[..., None, :]
    update = v if w is None else w[..., None] * v
    if e is not None:
        if e.dim() < k.dim():
            update = update - e[..., None] * (k[..., None, :] @ memory).squeeze(-2)
        else:
            update = update - (e[..., None, :] @ memory).squeeze(-2)
    memory = torch.addcmul(memory, k[..., :, None], update[..., None, :])
    return (q[..., None, :] @ memory).squeeze(-2), memory


def step_form(q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients, memory: Tensor) -> tuple[Tensor, Tensor]:
    """q, k (B,H,T,K), v (B,H,T,V), memory (B,H,K,V) -> y (B,H,T,V) in v's dtype, final memory; computed in memory's dtype."""
    present = {name: c for name, c in coefficients._asdict().items() if c is not None}
    return looped(None, True, q, k, v, present, memory)


def looped(
    rule: Rule | None,
    stepwise: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: dict[str, Tensor],
    memory: Tensor,
    *masks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns y (B,H,T,V) in v's dtype and the final memory by the recurrence, or by a form that a rule has of its own: its step,
    or all tokens at once by its sequence. ``masks`` are those of ``scan``."""
    if not is_compiling() or q.shape[2] == 1:
        return run(rule, stepwise, q, k, v, gates, memory, *masks)
    name = "" if rule is None else next(name for name, known in RULES.items() if known is rule)
    distinct = [x.view_as(x) for x in gates.values()]  # torch.compile wants no input twice
    return call("loop", name, stepwise, ",".join(gates), q, k, v, distinct, memory, *(masks or (None, None)))


def run(
    rule: Rule | None,
    stepwise: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: dict[str, Tensor],
    memory: Tensor,
    *masks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As ``looped``, without an operator."""
    if rule is None or rule.sequence is None or stepwise:
        return scan(step if rule is None or rule.step is None else rule.step, q, k, v, gates, memory, *masks)
    q, k, values, *given = (x.to(memory.dtype) for x in (q, k, v, *gates.values()))
    y, memory = rule.sequence(q, k, values, memory, *masks, **dict(zip(gates, given)))
    return y.to(v.dtype), memory


def scan(
    step: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: dict[str, Tensor],
    memory: Tensor,
    frozen: Tensor | None = None,
    reset: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Runs ``step`` over time. ``frozen`` (B,T): True where the memory must stay as it is; ``reset``: where it starts from 0."""
    inputs = [x.to(memory.dtype) for x in (q, k, v, *gates.values())]
    if q.shape[2] == 1 and frozen is None and reset is None:  # decoding: no need to unbind and stack
        q_t, k_t, v_t, *gates_t = (x.squeeze(2) for x in inputs)
        y, memory = step(memory, q_t, k_t, v_t, **dict(zip(gates, gates_t)))
        return y.unsqueeze(2).to(v.dtype), memory
    over_time = [x.unbind(2) for x in inputs]
    outputs = []
    for t, (q_t, k_t, v_t, *gates_t) in enumerate(zip(*over_time)):
        if reset is not None:
            memory = memory.masked_fill(reset[:, t, None, None, None], 0)
        y, written = step(memory, q_t, k_t, v_t, **dict(zip(gates, gates_t)))
        memory = written if frozen is None else torch.where(frozen[:, t, None, None, None], memory, written)
        outputs.append(y)
    return torch.stack(outputs, dim=2).to(v.dtype), memory


def _loop(*inputs) -> tuple[Tensor, Tensor]:
    """The operator, by the name of the rule with a form of its own, or nothing, and the names of the gates with commas between."""
    name, stepwise, names, q, k, v, gates, memory, frozen, reset = inputs
    return run(RULES[name] if name else None, stepwise, q, k, v, dict(zip(names.split(","), gates)), memory, frozen, reset)


@as_written
def _loop_forward(*inputs) -> tuple[Tensor, ...]:
    return tuple(x.contiguous() for x in _loop(*inputs))


def _loop_fake(*inputs) -> tuple[Tensor, Tensor]:
    v, memory = inputs[5], inputs[7]
    return v.new_empty(v.shape), memory.new_empty(memory.shape)


@as_written
def _loop_backward(*inputs) -> list[Tensor]:
    """The gradients of q, k, v, the gates and the first memory."""
    *words, q, k, v, gates, memory, frozen, reset, dy, dmemory = inputs
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *gates, memory)]
    with torch.enable_grad():
        found = _loop(*words, *leaves[:3], leaves[3:-1], leaves[-1], frozen, reset)
    results, dresults = zip(*((x, dx) for x, dx in zip(found, (dy, dmemory)) if dx is not None))
    grads = torch.autograd.grad(results, leaves, dresults, allow_unused=True)
    return [torch.zeros_like(x) if dx is None else dx.contiguous() for x, dx in zip(leaves, grads)]


def _loop_backward_fake(*inputs) -> list[Tensor]:
    q, k, v, gates, memory = inputs[3:8]
    return [x.new_empty(x.shape) for x in (q, k, v, *gates, memory)]


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *ctx.words, q, k, v, gates, memory, frozen, reset = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, memory, frozen, reset, *gates)


def _differentiate(ctx: Any, dy: Tensor | None, dmemory: Tensor | None) -> tuple:
    q, k, v, memory, frozen, reset, *gates = ctx.saved_tensors
    dq, dk, dv, *dgates, dfirst = call("loop_backward", *ctx.words, q, k, v, gates, memory, frozen, reset, dy, dmemory)
    return None, None, None, dq, dk, dv, dgates, dfirst, None, None


WORDS, MASKS = "str name, bool stepwise, str names", "Tensor? frozen, Tensor? reset"
INPUTS = f"{WORDS}, Tensor q, Tensor k, Tensor v, Tensor[] gates, Tensor memory, {MASKS}"
register("loop", f"({INPUTS}) -> (Tensor, Tensor)", _loop_forward, _loop_fake, _setup_context, _differentiate, device=EVERYWHERE)
register(
    "loop_backward", f"({INPUTS}, Tensor? dy, Tensor? dmemory) -> Tensor[]", _loop_backward, _loop_backward_fake, device=EVERYWHERE
)
