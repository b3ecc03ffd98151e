"""The ways to run a chunk, one for each kind of decay. They have one interface:

``forward(given, memory)`` returns y, the final memory, the inverse that the backward needs, and the memories before each chunk.
``backward(given, memories, inverse, dy, dfinal)`` returns the gradients in the order of ``ChunkInputs`` and that of the first
memory. None overflows for any gate from 0 to 1. ``dtype`` is that of dy and dfinal, None for that of the memory. Those with
``side_by_side`` take several chunks at once (``rows``).

    TokenGates          at most one gate per token
    ChannelGates        one gate per channel, in float64
    NearGates           one gate per feature and no value-side decay, with products in the range of fp32: in fp32
    LargeChannelGates   one gate per channel on both sides, none of them small, without erase: in fp32 (``large_gates``)
    ...WithZeros        the same where a gate of exactly 0 empties the whole memory, which leaves exactly nothing
    SingleTokens        one token at a time, where gates of exactly 0 empty some channels of the memory alone (``single``)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import rows
from .chunk import Chunk, Decay, Emptied, final_memory, gate_gradient, outputs, solve
from .rows import Row

Outcome = tuple[Tensor, Tensor, Any, Tensor]  # of forward
Given = Sequence[Any]  # q, k, v (B,H,T,...), and f, z, e, w, or None

SMALLEST_GATE = 1e-9  # a smaller gate per channel but 0 counts as this: invisible in fp32, and its gradient is right to 1e-6
SMALLEST_NEAR_GATE = 1 / 16  # of NearGates: rounding in fp32, about 1e-7, is divided by the gate in its gradient
SMALLEST_NEAR_PRODUCT = 1e-24  # with entries of 1e-12 and their products still in the range of fp32
CHUNK = 32  # tokens: float64 holds the products of as many of the smallest gates; also the fastest on a CPU without gates


class ChunkInputs(NamedTuple):
    """The operands of one chunk of C tokens, with (B,H) folded into N."""

    q: Tensor  # (N,C,K)
    k: Tensor  # (N,C,K)
    v: Tensor  # (N,C,V)
    f: Any  # None where absent, as all below: (N,C) or (N,C,K)
    z: Any  # (N,C,V)
    e: Any  # (N,C), or (N,C,K): the key that an erase reads with
    w: Any  # (N,C)

    def to(self, dtype: torch.dtype) -> ChunkInputs:
        """Everything in ``dtype`` and three-dimensional; one decay gate per token in float64."""
        decay = torch.float64 if dtype == torch.float64 or (self.f is not None and self.f.dim() == 2) else dtype
        f, z = (None if x is None else x.to(decay) for x in (self.f, self.z))
        f, e, w = (x.unsqueeze(-1) if x is not None and x.dim() == 2 else x for x in (f, self.e, self.w))
        e, w = (None if x is None else x.to(dtype) for x in (e, w))
        return ChunkInputs(self.q.to(dtype), self.k.to(dtype), self.v.to(dtype), f, z, e, w)

    @property
    def reads_apart(self) -> bool:
        """Whether e is the key that an erase reads with, not the strength with which it takes away what k reads."""
        return self.e is not None and self.e.dim() == 3

    def erasing(self, k: Tensor, e: Any) -> tuple[Tensor, Any]:
        """p and e of the ``Chunk``, for k and e in its dtype."""
        return (e, e.new_ones(1, 1, 1)) if self.reads_apart else (k, e)


def at_least_smallest(gate: Tensor) -> Tensor:
    """Gates that products of many can be divided by."""
    return gate.clamp(min=SMALLEST_GATE)


class TokenGates:
    """At most one gate per token: runs in the dtype of the memory, without a change of variables."""

    emptying = False  # whether gates may be 0, or below SMALLEST_GATE
    dtype: torch.dtype | None = None
    side_by_side = True

    @classmethod
    def open(cls, given: ChunkInputs, memory: Tensor) -> Chunk:
        q, k, v, f, _, e, w = given.to(memory.dtype)
        p, e = given.erasing(k, e)
        if f is None:
            return Chunk(q, k, p, v, e, w)
        if not cls.emptying:
            f = at_least_smallest(f)
            return Chunk(q, k, p, v, e, w, f, Decay.of(f, memory.dtype))
        zero, small = f == 0, f < SMALLEST_GATE
        gate = f.masked_fill(small, 1)
        emptied = Emptied.of(zero, small, Decay.of(gate, memory.dtype))
        decay = Decay.of_small(f.masked_fill(zero, 1), memory.dtype).across(emptied.text, 0)
        return Chunk(q, k, p, v, e, w, gate, decay, emptied)

    @classmethod
    def forward(cls, given: ChunkInputs, memory: Tensor) -> Outcome:
        chunk = cls.open(given, memory)
        solved, starts, last = rows.forward(Row(chunk), memory)
        return outputs(chunk, solved, starts), last, solved.inverse, starts

    @classmethod
    def backward(
        cls, given: ChunkInputs, memory: Tensor, inverse: Tensor | None, dy: Tensor, dfinal: Tensor
    ) -> tuple[Sequence[Tensor | None], Tensor]:
        chunk = cls.open(given, memory)
        g, _ = rows.gradients(Row(chunk), solve(chunk, memory, inverse), memory, dy, dfinal)
        dk, de = (g.k, g.p) if given.reads_apart else (g.k if g.p is None else g.k.add_(g.p), g.e)
        df = g.f if g.zeros is None else at_zeros(g.f, g.zeros[0], given.f.unsqueeze(-1).double() < SMALLEST_GATE)
        return (g.q, dk, g.v, df, None, de, g.w), g.memory


class TokenGatesWithZeros(TokenGates):
    """The same with gates that may be 0."""

    emptying = True


def at_zeros(gradient: Tensor, zeros: Tensor, where: Tensor) -> Tensor:
    """The gradient of gates (N,C,X), with that of gates of 0 where they are; zeros (N,C,X or more)."""
    if gradient.shape[-1] < zeros.shape[-1]:
        zeros = zeros.sum(-1, keepdim=True)
    return torch.where(where, zeros.to(gradient.dtype), gradient)


class ChannelGates:
    """One gate per channel, in a moving frame: keys are measured at the end of the chunk and values at its start, so that no
    product of the two leaves the range of float64."""

    emptying = False  # whether gates may be 0; then all gates of that token on one of the two sides are 0
    dtype: torch.dtype | None = torch.float64
    side_by_side = True

    def __init__(self, f: Any, z: Any) -> None:
        self.no_f: Any = None
        self.no_z: Any = None
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
    def open(cls, given: ChunkInputs, memory: Tensor) -> tuple[ChannelGates, Row, Tensor]:
        dtype = cls.dtype or memory.dtype
        q, k, v, f, z, e, w = given.to(dtype)
        frame = cls(f, z)
        p, e = given.erasing(k, e)
        p = k if e is None else p / frame.keys
        chunk = Chunk(q / frame.keys, k * frame.keys, p, v / frame.values, e, w, *frame.texts(k))
        return frame, Row(chunk, frame.carried_keys, None if z is None else frame.carried_values), memory.to(dtype)

    def texts(self, k: Tensor) -> tuple[None, Decay | None, Emptied | None]:
        """The gate, decay and zeros of the ``Chunk``: the frame has taken all decay out but that of gates of 0."""
        if not self.emptying:
            return None, None, None
        zero = torch.zeros_like(k[..., :1], dtype=torch.bool)
        for no in (self.no_f, self.no_z):
            zero = zero if no is None else zero | no
        products = Decay.of(torch.ones_like(k[..., :1]), k.dtype)
        emptied = Emptied.of(zero, zero, products)
        return None, products.across(emptied.text, 0), emptied

    @classmethod
    def forward(cls, given: ChunkInputs, memory: Tensor) -> Outcome:
        frame, row, start = cls.open(given, memory)
        solved, starts, last = rows.forward(row, start)
        y = outputs(row.chunk, solved, row.start(starts))
        return y if row.values is None else y.mul_(frame.values), last, solved.inverse, starts.to(memory.dtype)

    @classmethod
    def backward(
        cls, given: ChunkInputs, memory: Tensor, inverse: Tensor | None, dy: Tensor, dfinal: Tensor
    ) -> tuple[Sequence[Tensor | None], Tensor]:
        frame, row, start = cls.open(given, memory)
        c, start = row.chunk, row.start(start)
        s = solve(c, start, inverse)
        dy = dy if row.values is None else dy * frame.values
        g, dends = rows.gradients(row, s, start, dy, dfinal)
        final = final_memory(c, s, start.clone()).mul_(dends)
        dkeys = (c.q * g.q).addcmul_(c.k, g.k, value=-1)
        dvalues = outputs(c, s, start).mul_(dy).addcmul_(c.v, g.v, value=-1)
        dk, de = g.k.mul_(frame.keys), g.e
        if g.p is not None:
            dkeys.addcmul_(c.p, g.p)
            dp = g.p.div_(frame.keys)
            dk, de = (dk, dp) if given.reads_apart else (dk.add_(dp), de)
        df = None if given.f is None else gate_gradient(dkeys, final.sum(-1), frame.f, c.emptied)
        dz = None if given.z is None else gate_gradient(dvalues, final.sum(-2), frame.z, c.emptied)
        if g.zeros is not None:
            df = None if df is None else at_zeros(df, g.zeros[0], frame.no_f)
            dz = None if dz is None else at_zeros(dz, g.zeros[1], frame.no_z)
        grads = (g.q.div_(frame.keys), dk, g.v.div_(frame.values), df, dz, de, g.w)
        return grads, g.memory


class NearGates(ChannelGates):
    """The same in the dtype of the memory, for chunks whose products of gates are at least ``SMALLEST_NEAR_PRODUCT``."""

    dtype = None


class ChannelGatesWithZeros(ChannelGates):
    """The same with gates that may be 0."""

    emptying = True


def take(operands: Given, span: slice) -> ChunkInputs:
    """The operands of one turn."""
    parts: list[Any] = [None if x is None else rows_of(x, span) for x in operands]
    return ChunkInputs(*parts)


def rows_of(x: Tensor, span: slice) -> Tensor:
    """(B,H,T) or (B,H,T,X) -> (R B H,C) or (R B H,C,X): R chunks of these tokens side by side."""
    x = x[:, :, span]
    if x.shape[2] <= CHUNK:
        return x.flatten(0, 1)
    return x.unflatten(2, (-1, CHUNK)).movedim(2, 0).flatten(0, 2)


def put(x: Tensor, span: slice, rows: Tensor) -> None:
    """Writes rows (R B H,C), (R B H,C,1) or (R B H,C,X) to where ``rows_of`` finds them."""
    there = x[:, :, span]
    rows = rows if x.dim() - rows.dim() == 1 else rows.squeeze(-1)
    if there.shape[2] <= CHUNK:
        there.copy_(rows.unflatten(0, x.shape[:2]))
    else:
        there.unflatten(2, (-1, CHUNK)).copy_(rows.unflatten(0, (there.shape[2] // CHUNK, *x.shape[:2])).movedim(0, 2))
