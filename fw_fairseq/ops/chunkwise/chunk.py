"""One chunk of the recurrence as matrix products, forward and backward.

With U the rows actually written (``docs/chunk_form.md`` derives it):

    U = w V                                          without erase
    (I + tril(e K K^T, -1)) U = w V - e K W_0        with erase
    Y = Q W_0 + tril(Q K^T) U,      W_C = W_0 + K^T U

With one gate per token, each product is multiplied by the gates between its two tokens (``Decay``). Gates per channel do not get
here: ``frames`` takes them out by a change of variables.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Decay(NamedTuple):
    """The products of one gate per token: between two tokens, since the chunk's start, until its end, over all of it."""

    pair: Tensor  # (N,C,C), 0 above the diagonal
    start: Tensor  # (N,C,1)
    end: Tensor  # (N,C,1)
    total: Tensor  # (N,1,1)

    @classmethod
    def of(cls, gate: Tensor, dtype: torch.dtype) -> Decay:
        products = gate.cumprod(1)
        last = products[:, -1:]
        return cls((products / products.mT).to(dtype).tril_(), *(x.to(dtype) for x in (products, last / products, last)))

    @classmethod
    def of_small(cls, gate: Tensor, dtype: torch.dtype) -> Decay:
        """The same for gates of any size above 0: sums of logarithms neither overflow nor underflow."""
        logs = gate.log().cumsum(1)
        last = logs[:, -1:]
        return cls((logs - logs.mT).exp().to(dtype).tril_(), *(x.exp().to(dtype) for x in (logs, last - logs, last)))

    def across(self, text: Tensor, zeros: int) -> Decay:
        """The products that span ``zeros`` gates of 0, and 0 for the others. ``text`` (N,C,1): the number of gates of 0 up to each
        token."""
        last = text[:, -1:]
        spanned = (text - text.mT, text, last - text, last)
        return Decay(*(torch.where(count == zeros, x, 0.0) for count, x in zip(spanned, self)))


class Emptied(NamedTuple):
    """Where gates of exactly 0 empty the memory, or gates too small to divide by leave next to nothing of it. They count as 1 in
    ``Chunk.gate``. Their gradients are sums of products across one such gate, with 1 in its place, which ``once`` has."""

    text: Tensor  # (N,C,1): how many gates of 0 there were, up to each token; ``Chunk.decay`` has no product across one
    small: Tensor  # (N,C,1): the same with those too small
    once: Decay

    @classmethod
    def of(cls, zero: Tensor, small: Tensor, products: Decay) -> Emptied:
        """zero and small: (N,C,1) bool; products: those of the other gates."""
        small = small.cumsum(1)
        return cls(zero.cumsum(1), small, products.across(small, 1))

    def gradient(self, spanning: Tensor, ending: Tensor) -> Tensor:
        """The gradient of the gates, right at the zeros, from each token's reads across a zero (N,C,X) and from the memory that is
        carried on across the last zero (N,1,X)."""
        within = torch.bmm((self.small == self.small.mT).to(spanning.dtype), spanning)
        return torch.where(self.small == self.small[:, -1:], within + ending, within)


def gate_gradient(dprefix: Tensor, dlast: Tensor, gate: Tensor, emptied: Emptied | None = None) -> Tensor:
    """The gradient of gates (...,C,X), from dprefix (...,C,X or more), the gradient of the logs of their prefix products, and dlast
    (...,X or more), that of the last product as it decays the memory. A gate takes part in its own prefix product and in all
    later ones of its text."""
    dprefix[..., -1, :] += dlast
    if gate.shape[-1] < dprefix.shape[-1]:
        dprefix = dprefix.sum(-1, keepdim=True)
    later = dprefix.new_ones(gate.shape[-2], gate.shape[-2]).triu_()
    if emptied is not None:
        later = torch.where(emptied.text == emptied.text.mT, later, 0.0)
    return torch.matmul(later, dprefix).div_(gate)


class Chunk(NamedTuple):
    """The operands of one chunk, in the dtype that it is computed in, and its decay by one gate per token, None where absent."""

    q: Tensor  # (N,C,K)
    k: Tensor  # (N,C,K)
    p: Tensor  # (N,C,K): the key that an erase reads with; k itself but in a moving frame or where the rule has another
    v: Tensor  # (N,C,V)
    e: Any  # (N,C,1), or a 1 where p has the strength in it
    w: Any  # (N,C,1)
    gate: Any = None  # (N,C,1) float64
    decay: Any = None  # a Decay
    emptied: Any = None  # an Emptied

    def pairs(self, products: Tensor, diagonal: int = 0) -> Tensor:
        """Decayed products of token pairs. Pairs that look ahead become 0 first, so that an infinite product there makes no NaN."""
        products = products.tril_(diagonal)
        return products if self.decay is None else products.mul_(self.decay.pair)

    def since_start(self, rows: Tensor) -> Tensor:
        return rows if self.decay is None else rows * self.decay.start

    def until_end(self, rows: Tensor) -> Tensor:
        return rows if self.decay is None else rows * self.decay.end

    def carried_(self, memory: Tensor) -> Tensor:
        return memory if self.decay is None else memory.mul_(self.decay.total)


class Solved(NamedTuple):
    """The results that both the outputs and the gradients of a chunk are made from."""

    scores: Tensor  # (N,C,C): decayed tril(Q K^T)
    written: Tensor  # (N,C,V): U
    erase: Any = None  # (N,C,C): decayed tril(P K^T, -1)
    inverse: Any = None  # (N,C,C): (I + e erase)^-1
    recalled: Any = None  # (N,C,V): decayed P W_0


class Grads(NamedTuple):
    """The gradients of one chunk."""

    q: Tensor
    k: Tensor
    p: Any
    v: Tensor
    e: Any
    w: Any
    f: Any  # (N,C,1) of the gate of ``Decay``
    memory: Tensor
    zeros: Any  # (N,C,K), (N,C,V): of gates of 0 on the two sides; see ``Emptied``


def invert(c: Chunk, inverse: Tensor | None = None) -> Solved:
    """What a chunk computes without a memory. ``written`` is w V."""
    scores = c.pairs(torch.bmm(c.q, c.k.mT))
    written = c.v if c.w is None else c.w * c.v
    if c.e is None:
        return Solved(scores, written)
    erase = c.pairs(torch.bmm(c.p, c.k.mT), diagonal=-1)
    if inverse is None:
        eye = torch.eye(erase.shape[-1], dtype=erase.dtype, device=erase.device).expand_as(erase)
        inverse = torch.linalg.solve_triangular(c.e * erase, eye, upper=False, unitriangular=True)
    return Solved(scores, written, erase, inverse)


def solve(c: Chunk, memory: Tensor, inverse: Tensor | None = None) -> Solved:
    """What both passes need of a chunk."""
    s = invert(c, inverse)
    if c.e is None:
        return s
    recalled = c.since_start(torch.bmm(c.p, memory))
    return s._replace(written=torch.bmm(s.inverse, s.written - c.e * recalled), recalled=recalled)


def outputs(c: Chunk, s: Solved, memory: Tensor) -> Tensor:
    """The reads of a chunk, (N,C,V)."""
    return torch.bmm(c.since_start(c.q), memory).baddbmm_(s.scores, s.written)


def final_memory(c: Chunk, s: Solved, memory: Tensor) -> Tensor:
    """The memory after the chunk, in the place of the one before it."""
    return c.carried_(memory).baddbmm_(c.until_end(c.k).mT, s.written)


def backward(c: Chunk, s: Solved, memory: Tensor, dy: Tensor, dfinal: Tensor, dwritten: Tensor | None = None) -> Grads:
    """The gradients of one chunk, from those of its outputs, dy (N,C,V), and of its final memory, dfinal (N,K,V). With those of
    the rows written it leaves out that of the memory; without, it overwrites dfinal."""
    alone = dwritten is None
    dwritten = torch.bmm(s.scores.mT, dy).baddbmm_(c.until_end(c.k), dfinal) if dwritten is None else dwritten
    dsource = dwritten if c.e is None else torch.bmm(s.inverse.mT, dwritten)  # of w V - e recalled
    dv = dsource if c.w is None else c.w * dsource
    dw = None if c.w is None else (dsource * c.v).sum(-1)

    dscores = torch.bmm(dy, s.written.mT)
    dq_start = c.since_start(torch.bmm(dy, memory.mT))
    dk_end = c.until_end(torch.bmm(s.written, dfinal.mT))
    dp: Any = None
    de = df = derase = drecalled = zeros = dp
    if c.e is not None:
        derase = torch.bmm(dsource, s.written.mT).neg_()
        drecalled = -c.e * dsource
        de = (derase * s.erase).sum(-1) - (dsource * s.recalled).sum(-1)
        derase.mul_(c.e)
    if c.emptied is not None:
        zeros = zero_gradients(c, s, memory, dy, dfinal, dscores, derase, drecalled)
    if c.gate is not None:
        df = scalar_gate_gradient(c, s, memory, dfinal, dscores, dq_start, dk_end, derase, drecalled)

    dmemory = c.carried_(dfinal).baddbmm_(c.since_start(c.q).mT, dy) if alone else dfinal
    dscores = c.pairs(dscores)
    dq = dq_start.baddbmm_(dscores, c.k)
    dk = dk_end.baddbmm_(dscores.mT, c.q)
    if c.e is not None:
        if alone:
            dmemory.baddbmm_(c.since_start(c.p).mT, drecalled)
        derase = c.pairs(derase, diagonal=-1)
        dp = torch.bmm(c.since_start(drecalled), memory.mT).baddbmm_(derase, c.k)
        dk.baddbmm_(derase.mT, c.p)
    return Grads(dq, dk, dp, dv, de, dw, df, dmemory, zeros)


def zero_gradients(
    c: Chunk,
    s: Solved,
    memory: Tensor,
    dy: Tensor,
    dfinal: Tensor,
    dscores: Tensor,
    derase: Any,
    drecalled: Any,
) -> tuple[Tensor, Tensor]:
    """The gradients of gates of 0 on the key side and, for a chunk that erases nothing, on the value side: sums of every product
    that spans one such gate and no other."""
    once = c.emptied.once
    keys = c.q * torch.bmm(dscores.tril() * once.pair, c.k).add_(once.start * torch.bmm(dy, memory.mT))
    if derase is not None:
        keys += c.p * torch.bmm(derase.tril(-1) * once.pair, c.k).add_(once.start * torch.bmm(drecalled, memory.mT))
    carried = once.total * memory * dfinal
    key_ends = (once.end * c.k * torch.bmm(s.written, dfinal.mT)).sum(1, keepdim=True) + carried.sum(-1).unsqueeze(1)
    scores = torch.bmm(c.q, c.k.mT).tril_() * once.pair
    values = dy * torch.bmm(scores, s.written).add_(once.start * torch.bmm(c.q, memory))
    value_ends = (once.end * s.written * torch.bmm(c.k, dfinal)).sum(1, keepdim=True) + carried.sum(-2).unsqueeze(1)
    return c.emptied.gradient(keys, key_ends), c.emptied.gradient(values, value_ends)


def scalar_gate_gradient(
    c: Chunk,
    s: Solved,
    memory: Tensor,
    dfinal: Tensor,
    dscores: Tensor,
    dq_start: Tensor,
    dk_end: Tensor,
    derase: Any,
    drecalled: Any,
) -> Tensor:
    """The gradient of one gate per token, (N,C,1) in float64. Each decayed quantity adds its product with its gradient where its
    span ends and subtracts it where the span starts. These are the same fp32 numbers in float64 sums: what does not span the
    gate cancels exactly, and a gate of 1e-6 still gets its gradient right."""
    pair = dscores * s.scores
    starting = (dq_start * c.q).sum(-1).double()
    if derase is not None:
        pair += derase * s.erase
        starting += (drecalled * s.recalled).sum(-1)
    ending = (dk_end * c.k).sum(-1).double()
    dprefix = pair.sum(-1, dtype=torch.float64) - pair.sum(-2, dtype=torch.float64) + starting - ending
    carried = (memory * dfinal * c.decay.total).sum((-2, -1)).double()
    return gate_gradient(dprefix.unsqueeze(-1), (ending.sum(1) + carried).unsqueeze(-1), c.gate, c.emptied)
