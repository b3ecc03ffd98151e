"""How the gates of a chunk are taken care of: three ways to run a chunk, the same interface.

``forward(cut, memory)`` gives y, the final memory and the inverse to keep; ``backward(cut, memory, inverse, dy, dfinal)`` the
gradients in the order of ``Cut`` and that of the memory. None overflows for any gate in its range.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .chunk import Chunk, Decay, backward, final_memory, gate_gradient, outputs, solve

SMALLEST_GATE = 1e-9  # smaller gates count as this: invisible in fp32, and their gradient stays right to 1e-6
NARROW_GATE = 1e-3  # from here on fp32 holds the products of 8 gates, and their gradient to about 1e-6 / gate
NARROW_LENGTH = 16


class Cut(NamedTuple):
    """A chunk's slice of every operand, (B,H) folded into N."""

    q: Tensor  # (N,C,K)
    k: Tensor  # (N,C,K)
    v: Tensor  # (N,C,V)
    f: Tensor | None  # (N,C) or (N,C,K)
    z: Tensor | None  # (N,C,V)
    e: Tensor | None  # (N,C)
    w: Tensor | None  # (N,C)

    def to(self, dtype: torch.dtype) -> Cut:
        """Everything in ``dtype`` and three-dimensional; one decay gate per token in float64."""
        decay = torch.float64 if dtype == torch.float64 or (self.f is not None and self.f.dim() == 2) else dtype
        f, z = (None if x is None else x.to(decay) for x in (self.f, self.z))
        f, e, w = (x.unsqueeze(-1) if x is not None and x.dim() == 2 else x for x in (f, self.e, self.w))
        e, w = (None if x is None else x.to(dtype) for x in (e, w))
        return Cut(*(x.to(dtype) for x in self[:3]), f, z, e, w)


def kept_from_zero(gate: Tensor) -> Tensor:
    return gate.clamp(min=SMALLEST_GATE)


class Still:
    """At most one gate per token: no change of variables, the dtype of the memory."""

    @staticmethod
    def open(cut: Cut, memory: Tensor) -> Chunk:
        q, k, v, f, _, e, w = cut.to(memory.dtype)
        if f is None:
            return Chunk(q, k, k, v, e, w, None, None)
        f = kept_from_zero(f)
        return Chunk(q, k, k, v, e, w, f, Decay.of(f, memory.dtype))

    @classmethod
    def forward(cls, cut: Cut, memory: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        chunk = cls.open(cut, memory)
        solved = solve(chunk, memory)
        return outputs(chunk, solved, memory), final_memory(chunk, solved, memory.clone()), solved.inverse

    @classmethod
    def backward(cls, cut: Cut, memory: Tensor, inverse: Tensor | None, dy: Tensor, dfinal: Tensor):
        chunk = cls.open(cut, memory)
        g = backward(chunk, solve(chunk, memory, inverse), memory, dy, dfinal)
        dk = g.k if g.p is None else g.k.add_(g.p)
        return (g.q, dk, g.v, g.f, None, g.e, g.w), g.memory


class Frame:
    """The moving frame of one gate per channel: keys measured by what is left of them at the chunk's end, values by what they
    were worth at its start, so that no product of the two leaves the range of float64."""

    def __init__(self, f: Tensor | None, z: Tensor | None):
        still = torch.ones_like((f if z is None else z)[:1, :, :1])
        self.f, self.z = (still if x is None else kept_from_zero(x) for x in (f, z))
        products = self.f.cumprod(1)
        self.carried_keys = products[:, -1:].mT  # (N,K,1)
        self.keys = products[:, -1:] / products
        self.values = self.z.cumprod(1)
        self.carried_values = self.values[:, -1:]  # (N,1,V)

    @classmethod
    def open(cls, cut: Cut, memory: Tensor) -> tuple[Frame, Chunk, Tensor]:
        q, k, v, f, z, e, w = cut.to(torch.float64)
        frame = cls(f, z)
        p = k if e is None else k / frame.keys
        chunk = Chunk(q / frame.keys, k * frame.keys, p, v / frame.values, e, w, None, None)
        return frame, chunk, memory.double() * frame.carried_keys

    @classmethod
    def forward(cls, cut: Cut, memory: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        frame, chunk, start = cls.open(cut, memory)
        solved = solve(chunk, start)
        y = outputs(chunk, solved, start).mul_(frame.values)
        return y, final_memory(chunk, solved, start).mul_(frame.carried_values), solved.inverse

    @classmethod
    def backward(cls, cut: Cut, memory: Tensor, inverse: Tensor | None, dy: Tensor, dfinal: Tensor):
        frame, c, start = cls.open(cut, memory)
        s = solve(c, start, inverse)
        dy, dfinal = dy * frame.values, dfinal * frame.carried_values
        final = final_memory(c, s, start.clone()).mul_(dfinal)
        g = backward(c, s, start, dy, dfinal)
        dkeys = (c.q * g.q).addcmul_(c.k, g.k, value=-1)
        dvalues = outputs(c, s, start).mul_(dy).addcmul_(c.v, g.v, value=-1)
        dk = g.k.mul_(frame.keys)
        if g.p is not None:
            dkeys.addcmul_(c.p, g.p)
            dk += g.p / frame.keys
        df = None if cut.f is None else gate_gradient(dkeys, final.sum(-1), frame.f)
        dz = None if cut.z is None else gate_gradient(dvalues, final.sum(-2), frame.z)
        grads = (g.q.div_(frame.keys), dk, g.v.div_(frame.values), df, dz, g.e, g.w)
        return grads, g.memory.mul_(frame.carried_keys)


class Products(NamedTuple):
    """Products of fp32 gates over a short chunk: relative to its middle and back, since its start, until its end."""

    middle: Tensor  # (N,C,X)
    back: Tensor  # (N,C,X)
    start: Tensor  # (N,C,X)
    end: Tensor  # (N,C,X)
    total: Tensor  # (N,1,X)

    @classmethod
    def of(cls, *gates: Tensor) -> list[Products]:
        """Of several gates at once."""
        halves = torch.cat(gates, dim=-1).unflatten(1, (2, -1)).cumprod(2)
        first = halves[:, 0, -1:].clone()
        halves[:, 0].div_(first)
        middle = halves.flatten(1, 2)
        back, last = middle.reciprocal(), middle[:, -1:]
        joint = (middle, back, middle * first, back * last, first * last)
        return [cls(*parts) for parts in zip(*(x.split([gate.shape[-1] for gate in gates], dim=-1) for x in joint))]


class Narrow:
    """One gate per channel, all of at least NARROW_GATE, without erase: fp32. Pairs of tokens in the chunk are weighed relative to
    its middle; what comes from the memory or goes into it, relative to start and end, where no factor exceeds 1."""

    @staticmethod
    def forward(cut: Cut, memory: Tensor) -> tuple[Tensor, Tensor, None]:
        q, k, v, f, z, _, w = cut.to(memory.dtype)
        key, value = Products.of(f, z)
        v = v if w is None else v * w
        scores = torch.bmm(q * key.middle, (k * key.back).mT).tril_()
        y = torch.bmm(scores, v * value.back).mul_(value.middle)
        y.addcmul_(torch.bmm(q * key.start, memory), value.start)
        final = (memory * key.total.mT).mul_(value.total)
        return y, final.baddbmm_((k * key.end).mT, v * value.end), None

    @staticmethod
    def backward(cut: Cut, memory: Tensor, _, dy: Tensor, dfinal: Tensor):
        q, k, source, f, z, _, w = cut.to(memory.dtype)
        key, value = Products.of(f, z)
        v = source if w is None else source * w
        q_middle, k_back, v_back = q * key.middle, k * key.back, v * value.back
        q_start, k_end, v_end = q * key.start, k * key.end, v * value.end
        dy_middle, dy_start = dy * value.middle, dy * value.start

        scores = torch.bmm(q_middle, k_back.mT).tril_()
        dscores = torch.bmm(dy_middle, v_back.mT).tril_()
        y = torch.bmm(scores, v_back).mul_(dy_middle).addcmul_(torch.bmm(q_start, memory), dy_start)
        dq = torch.bmm(dscores, k_back).mul_(key.middle).addcmul_(torch.bmm(dy_start, memory.mT), key.start)
        dk_end = torch.bmm(v_end, dfinal.mT)
        dk = torch.bmm(dscores.mT, q_middle).mul_(key.back).addcmul_(dk_end, key.end)
        dv_end = torch.bmm(k_end, dfinal)
        dv = torch.bmm(scores.mT, dy_middle).mul_(value.back).addcmul_(dv_end, value.end)

        carried = (memory * dfinal).mul_(key.total.mT).mul_(value.total)
        dkeys, dvalues = (q * dq).addcmul_(k, dk, value=-1), y.addcmul_(v, dv, value=-1)
        df = gate_gradient(dkeys, carried.sum(-1) + (k_end * dk_end).sum(1), f)
        dz = gate_gradient(dvalues, carried.sum(-2) + (v_end * dv_end).sum(1), z)
        dmemory = (dfinal * key.total.mT).mul_(value.total).baddbmm_(q_start.mT, dy_start)
        dw = None if w is None else (dv * source).sum(-1)
        return (dq, dk, dv if w is None else dv * w, df, dz, None, dw), dmemory
