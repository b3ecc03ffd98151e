"""The recurrence one token at a time: the definition that every other form is tested against.

It takes any floating dtype, float64 included. Gradients are plain autograd, so a long sequence keeps one memory per step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rules import Coefficients


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
    return scan(step, q, k, v, present, memory)


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
