"""The recurrence one token at a time: the definition that every other form is tested against.

It takes any floating dtype, float64 included. Gradients are plain autograd, so a long sequence keeps one memory per step.

``torch.compile`` would unroll a loop, and take minutes for 16 tokens. For it several tokens are one operator, ``loop``, which runs
this file's loop, or that of a rule with a form of its own; its backward runs it again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..autograd import as_written
from ..rules import RULES, Coefficients, Rule
from .kernels.operators import EVERYWHERE, call, is_compiling, register


def step(memory: Tensor, q: Tensor, k: Tensor, v: Tensor, f=None, z=None, e=None, w=None) -> tuple[Tensor, Tensor]:
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


def looped(rule: Rule | None, stepwise: bool, q, k, v, gates: dict[str, Tensor], memory: Tensor, frozen=None, reset=None):
    """Returns y (B,H,T,V) in v's dtype and the final memory by the recurrence, or by a form that a rule has of its own: its step,
    or all tokens at once by its sequence. Masks and their meaning are those of ``scan``."""
    if not is_compiling() or q.shape[2] == 1:
        return run(rule, stepwise, q, k, v, gates, memory, frozen, reset)
    name = "" if rule is None else next(name for name, known in RULES.items() if known is rule)
    distinct = [x.view_as(x) for x in gates.values()]  # torch.compile wants no input twice
    return call("loop", name, stepwise, ",".join(gates), q, k, v, distinct, memory, frozen, reset)


def run(rule: Rule | None, stepwise: bool, q, k, v, gates: dict[str, Tensor], memory, frozen, reset) -> tuple[Tensor, Tensor]:
    """As ``looped``, without an operator."""
    if rule is None or stepwise:
        return scan(step if rule is None else rule.step, q, k, v, gates, memory, frozen, reset)
    q, k, values, *given = (x.to(memory.dtype) for x in (q, k, v, *gates.values()))
    y, memory = rule.sequence(q, k, values, memory, frozen, reset, **dict(zip(gates, given)))
    return y.to(v.dtype), memory


def scan(step, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], memory: Tensor, frozen=None, reset=None):
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


def loop(name: str, stepwise: bool, names: str, q, k, v, gates, memory, frozen, reset) -> tuple[Tensor, Tensor]:
    """The operator. ``name``: of the rule with a form of its own, or nothing; ``names``: of the gates, with commas between."""
    named = dict(zip(names.split(","), gates))
    return run(RULES[name] if name else None, stepwise, q, k, v, named, memory, frozen, reset)


@as_written
def loop_forward(*inputs) -> tuple[Tensor, Tensor]:
    return tuple(x.contiguous() for x in loop(*inputs))


def loop_fake(name, stepwise, names, q, k, v, gates, memory, frozen, reset) -> tuple[Tensor, Tensor]:
    """Returns tensors of the shapes that ``loop`` returns."""
    return v.new_empty(v.shape), memory.new_empty(memory.shape)


@as_written
def loop_backward(name, stepwise, names, q, k, v, gates, memory, frozen, reset, dy, dmemory) -> list[Tensor]:
    """Returns the gradients of q, k, v, the gates and the first memory."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *gates, memory)]
    with torch.enable_grad():
        q, k, v, *gates, memory = leaves
        found = loop(name, stepwise, names, q, k, v, gates, memory, frozen, reset)
    results, dresults = zip(*((x, dx) for x, dx in zip(found, (dy, dmemory)) if dx is not None))
    grads = torch.autograd.grad(results, leaves, dresults, allow_unused=True)
    return [torch.zeros_like(x) if dx is None else dx.contiguous() for x, dx in zip(leaves, grads)]


def loop_backward_fake(name, stepwise, names, q, k, v, gates, memory, frozen, reset, dy, dmemory) -> list[Tensor]:
    """Returns tensors of the shapes that ``loop_backward`` returns."""
    return [x.new_empty(x.shape) for x in (q, k, v, *gates, memory)]


def setup_context(ctx, inputs, output) -> None:
    *ctx.words, q, k, v, gates, memory, frozen, reset = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, memory, frozen, reset, *gates)


def differentiate(ctx, dy, dmemory):
    q, k, v, memory, frozen, reset, *gates = ctx.saved_tensors
    dq, dk, dv, *dgates, dfirst = call("loop_backward", *ctx.words, q, k, v, gates, memory, frozen, reset, dy, dmemory)
    return None, None, None, dq, dk, dv, dgates, dfirst, None, None


WORDS, MASKS = "str name, bool stepwise, str names", "Tensor? frozen, Tensor? reset"
INPUTS = f"{WORDS}, Tensor q, Tensor k, Tensor v, Tensor[] gates, Tensor memory, {MASKS}"
register("loop", f"({INPUTS}) -> (Tensor, Tensor)", loop_forward, loop_fake, setup_context, differentiate, device=EVERYWHERE)
register(
    "loop_backward", f"({INPUTS}, Tensor? dy, Tensor? dmemory) -> Tensor[]", loop_backward, loop_backward_fake, device=EVERYWHERE
)
