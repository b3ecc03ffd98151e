"""How the gates of a chunk are taken care of: the ways to run a chunk, the same interface.

``forward(cut, memory)`` gives y, the final memory and the inverse to keep; ``backward(cut, memory, inverse, dy, dfinal)`` the
gradients in the order of ``Cut`` and that of the memory. None overflows for any gate in its range. A gate of exactly 0 leaves
exactly nothing: those that empty the whole memory cut a chunk into texts (``Still.emptying``, ``Frame.emptying``), and those that
empty some of its channels have ``Steps``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...rules import Coefficients
from ..recurrent import step_form
from .chunk import Chunk, Decay, Emptied, backward, final_memory, gate_gradient, outputs, solve

SMALLEST_GATE = 1e-9  # of those per channel smaller ones but 0 count as this: invisible in fp32, and their gradient right to 1e-6
NARROW_GATE = 1e-3  # from here on fp32 holds the products of 8 gates, and their gradient to about 1e-6 / gate
CHUNK = 32  # tokens; the products of as many gates on either side stay inside float64, and the fastest without gates on a CPU
NARROW_CHUNK = 16  # where it runs in fp32, two side by side


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


def at_least_smallest(gate: Tensor) -> Tensor:
    return gate.clamp(min=SMALLEST_GATE)


class Still:
    """At most one gate per token: no change of variables, the dtype of the memory."""

    emptying = False  # whether gates may be 0, or below SMALLEST_GATE

    @classmethod
    def open(cls, cut: Cut, memory: Tensor) -> Chunk:
        q, k, v, f, _, e, w = cut.to(memory.dtype)
        if f is None:
            return Chunk(q, k, k, v, e, w)
        if not cls.emptying:
            f = at_least_smallest(f)
            return Chunk(q, k, k, v, e, w, f, Decay.of(f, memory.dtype))
        zero, small = f == 0, f < SMALLEST_GATE
        gate = f.masked_fill(small, 1)
        emptied = Emptied.of(zero, small, Decay.of(gate, memory.dtype))
        decay = Decay.of_small(f.masked_fill(zero, 1), memory.dtype).across(emptied.text, 0)
        return Chunk(q, k, k, v, e, w, gate, decay, emptied)

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
        df = g.f if g.zeros is None else at_zeros(g.f, g.zeros[0], cut.f.unsqueeze(-1) < SMALLEST_GATE)
        return (g.q, dk, g.v, df, None, g.e, g.w), g.memory


class EmptyingStill(Still):
    emptying = True


def at_zeros(gradient: Tensor, zeros: Tensor, where: Tensor) -> Tensor:
    """The gradient of gates (N,C,X), with that of gates of 0 where they are; zeros (N,C,X or more)."""
    if gradient.shape[-1] < zeros.shape[-1]:
        zeros = zeros.sum(-1, keepdim=True)
    return torch.where(where, zeros.to(gradient.dtype), gradient)


class Frame:
    """The moving frame of one gate per channel: keys measured by what is left of them at the chunk's end, values by what they
    were worth at its start, so that no product of the two leaves the range of float64."""

    emptying = False  # whether gates may be 0; then all of a token's on one of the two sides are

    def __init__(self, f: Tensor | None, z: Tensor | None):
        still = torch.ones_like((f if z is None else z)[:1, :, :1])
        self.f, self.z = (still if x is None else at_least_smallest(x) for x in (f, z))
        if self.emptying:
            self.no_f, self.no_z = (None if x is None else x[..., :1] == 0 for x in (f, z))
            self.f, self.z = (x if no is None else x.masked_fill(no, 1) for x, no in ((self.f, self.no_f), (self.z, self.no_z)))
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
        chunk = Chunk(q / frame.keys, k * frame.keys, p, v / frame.values, e, w, *frame.texts(k))
        return frame, chunk, memory.double() * frame.carried_keys

    def texts(self, k: Tensor) -> tuple[None, Decay | None, Emptied | None]:
        """What ``Chunk`` has of decay besides the frame's: none but where the memory is emptied."""
        if not self.emptying:
            return None, None, None
        zero = torch.zeros_like(k[..., :1], dtype=torch.bool)
        for no in (self.no_f, self.no_z):
            zero = zero if no is None else zero | no
        products = Decay.of(torch.ones_like(k[..., :1]), k.dtype)
        emptied = Emptied.of(zero, zero, products)
        return None, products.across(emptied.text, 0), emptied

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
        df = None if cut.f is None else gate_gradient(dkeys, final.sum(-1), frame.f, c.emptied)
        dz = None if cut.z is None else gate_gradient(dvalues, final.sum(-2), frame.z, c.emptied)
        if g.zeros is not None:
            df = None if df is None else at_zeros(df, g.zeros[0], frame.no_f)
            dz = None if dz is None else at_zeros(dz, g.zeros[1], frame.no_z)
        grads = (g.q.div_(frame.keys), dk, g.v.div_(frame.values), df, dz, g.e, g.w)
        return grads, g.memory.mul_(frame.carried_keys)


class EmptyingFrame(Frame):
    emptying = True


class Steps:
    """One token at a time, and gradients by autograd, for gates that empty some channels of the memory and not the others."""

    @staticmethod
    def run(cut: Cut, memory: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, *coefficients = (None if x is None else x.unsqueeze(1) for x in cut)
        y, memory = step_form(q, k, v.to(memory.dtype), Coefficients(*coefficients), memory.unsqueeze(1))
        return y.squeeze(1), memory.squeeze(1)

    @classmethod
    def forward(cls, cut: Cut, memory: Tensor) -> tuple[Tensor, Tensor, None]:
        return *cls.run(cut, memory), None

    @classmethod
    def backward(cls, cut: Cut, memory: Tensor, _, dy: Tensor, dfinal: Tensor):
        with torch.enable_grad():
            leaves = [None if x is None else x.detach().requires_grad_() for x in (*cut, memory)]
            results = cls.run(Cut(*leaves[:-1]), leaves[-1])
        given = [x for x in leaves if x is not None]
        grads = iter(torch.autograd.grad(results, given, (dy.to(memory.dtype), dfinal.to(memory.dtype))))
        grads = [None if x is None else next(grads) for x in leaves]
        return [None if x is None else x.unsqueeze(-1) if x.dim() == 2 else x for x in grads[:-1]], grads[-1]


class Products(NamedTuple):
    """Products of fp32 gates over short chunks: relative to the middle and back, since the start, until the end, in all."""

    middle: Tensor  # (N,R,C,X)
    back: Tensor  # (N,R,C,X)
    start: Tensor  # (N,R,C,X)
    end: Tensor  # (N,R,C,X)
    total: Tensor  # (N,R,1,X)

    @classmethod
    def of(cls, *gates: Tensor) -> list[Products]:
        """Of several gates at once."""
        halves = torch.cat(gates, dim=-1).unflatten(2, (2, -1)).cumprod(3)
        first = halves[:, :, 0, -1:].clone()
        halves[:, :, 0].div_(first)
        middle = halves.flatten(2, 3)
        back, last = middle.reciprocal(), middle[:, :, -1:]
        joint = (middle, back, middle * first, back * last, first * last)
        return [cls(*parts) for parts in zip(*(x.split([gate.shape[-1] for gate in gates], dim=-1) for x in joint))]


class Narrow:
    """One gate per channel, all of at least NARROW_GATE, without erase: fp32, R chunks of NARROW_CHUNK tokens side by side. Pairs
    of tokens in a chunk are weighed relative to its middle; what comes from the memory or goes into it, relative to start and end,
    where no factor exceeds 1. Only the memory goes from chunk to chunk."""

    def __init__(self, cut: Cut, memory: Tensor):
        opened = (None if x is None else x.unflatten(1, (-1, NARROW_CHUNK)) for x in cut.to(memory.dtype))
        self.q, self.k, self.source, self.f, self.z, _, self.w = opened
        self.v = self.source if self.w is None else self.source * self.w
        self.key, self.value = Products.of(self.f, self.z)
        self.q_middle, self.q_start = self.q * self.key.middle, self.q * self.key.start
        self.k_back, self.k_end = self.k * self.key.back, self.k * self.key.end
        self.v_back, self.v_end = self.v * self.value.back, self.v * self.value.end
        self.scores = (self.q_middle @ self.k_back.mT).tril_()
        self.starts, self.final = self.chain(memory, self.k_end.mT @ self.v_end)

    def chain(self, memory: Tensor, added: Tensor, backwards: bool = False) -> tuple[Tensor, Tensor]:
        """Carries a memory (N,K,V) over the chunks, each adding its share (N,R,K,V): what each chunk is given, and the last."""
        given = torch.empty_like(added)
        for r in reversed(range(added.shape[1])) if backwards else range(added.shape[1]):
            given[:, r] = memory
            memory = torch.addcmul(added[:, r], memory * self.key.total[:, r].mT, self.value.total[:, r])
        return given, memory

    @classmethod
    def forward(cls, cut: Cut, memory: Tensor) -> tuple[Tensor, Tensor, None]:
        c = cls(cut, memory)
        y = (c.scores @ c.v_back).mul_(c.value.middle).addcmul_(c.q_start @ c.starts, c.value.start)
        return y.flatten(1, 2), c.final, None

    @classmethod
    def backward(cls, cut: Cut, memory: Tensor, _, dy: Tensor, dfinal: Tensor):
        c = cls(cut, memory)
        key, value = c.key, c.value
        dy = dy.unflatten(1, (-1, NARROW_CHUNK))
        dy_middle, dy_start = dy * value.middle, dy * value.start
        dscores = (dy_middle @ c.v_back.mT).tril_(-1)
        dends, dmemory = c.chain(dfinal, c.q_start.mT @ dy_start, backwards=True)
        own, scores = c.scores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1), c.scores.tril(-1)

        # What no gate decays, a token's read of itself and the last one's write into the memory, is nothing to the gates.
        y = (scores @ c.v_back).mul_(dy_middle).addcmul_(c.q_start @ c.starts, dy_start)  # times its gradient
        dq = (dscores @ c.k_back).mul_(key.middle).addcmul_(dy_start @ c.starts.mT, key.start)
        dk = (dscores.mT @ c.q_middle).mul_(key.back)
        dv = (scores.mT @ dy_middle).mul_(value.back)
        dk_end, dv_end = c.v_end @ dends.mT, c.k_end @ dends
        key_ends, value_ends = dk_end * c.k_end, dv_end * c.v_end
        key_ends[..., -1, :], value_ends[..., -1, :] = 0, 0
        carried = c.starts.mul_(dends).mul_(key.total.mT).mul_(value.total)
        dkeys, dvalues = (c.q * dq).addcmul_(c.k, dk, value=-1).sub_(key_ends), y.addcmul_(c.v, dv, value=-1).sub_(value_ends)
        df = gate_gradient(dkeys, carried.sum(-1) + key_ends.sum(2), c.f)
        dz = gate_gradient(dvalues, carried.sum(-2) + value_ends.sum(2), c.z)

        down = (dy * c.v).sum(-1, keepdim=True)
        dq.addcmul_(down, c.k)
        dk.addcmul_(dk_end, key.end).addcmul_(down, c.q)
        dv.addcmul_(dv_end, value.end).addcmul_(own, dy)
        dw = None if c.w is None else (dv * c.source).sum(-1, keepdim=True)
        grads = (dq, dk, dv if c.w is None else dv * c.w, df, dz, None, dw)
        return tuple(None if g is None else g.flatten(1, 2) for g in grads), dmemory
