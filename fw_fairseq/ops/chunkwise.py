"""The recurrence in chunks: matrix products inside a chunk, the memory carried from chunk to chunk.

Inside a chunk of C tokens with U the rows actually written (``docs/chunk_form.md`` derives it):

    U = w V                                          without erase
    (I + tril(e K K^T, -1)) U = w V - e K W_0        with erase
    Y = Q W_0 + tril(Q K^T) U,      W_C = W_0 + K^T U

Decay enters in one of two ways, both free of overflow and of cancellation for every gate in [0, 1]:
- one gate per token: each product K K^T, Q K^T is weighted by the C x C matrix of decays between its two tokens;
- one gate per channel: the plain form in a moving frame, a change of variables that scales q by the decay since the middle of
  the chunk and k by its inverse. Over a chunk these factors span more than fp32 holds, so the frame works in float64.

The backward keeps the inputs and one memory per chunk, and recomputes the rest. Its cost is a fixed multiple of the forward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..rules import Coefficients

CHUNK = 32  # tokens; the products of as many gates on either side stay inside float64
SMALLEST_GATE = 1e-9  # smaller gates count as this: invisible in fp32, and their gradient stays right to 1e-6


class Decay(NamedTuple):
    """Products of one gate per token: between two tokens, since the chunk's start, until its end, over all of it."""

    pair: Tensor  # (N,C,C), 0 above the diagonal
    start: Tensor  # (N,C,1)
    end: Tensor  # (N,C,1)
    total: Tensor  # (N,1,1)

    @classmethod
    def of(cls, gate: Tensor, dtype: torch.dtype) -> Decay:
        products = gate.cumprod(1)
        last = products[:, -1:]
        return cls((products / products.mT).to(dtype).tril_(), *(x.to(dtype) for x in (products, last / products, last)))


def gate_gradient(dprefix: Tensor, dlast: Tensor, gate: Tensor) -> Tensor:
    """The gradient of gates (N,C,X): dprefix (N,C,X or more) is that of their log prefix products, dlast (N,X or more) that of
    the last product as it carries the memory on. A gate takes part in its own prefix product and in all later ones."""
    dprefix[:, -1] += dlast
    if gate.shape[-1] < dprefix.shape[-1]:
        dprefix = dprefix.sum(-1, keepdim=True)
    later = dprefix.new_ones(gate.shape[1], gate.shape[1]).triu_()
    return torch.matmul(later, dprefix).div_(gate)


class Chunk(NamedTuple):
    """The operands of one chunk, in the dtype it is computed in, and what its scalar decay does to products."""

    q: Tensor  # (N,C,K)
    k: Tensor  # (N,C,K)
    p: Tensor  # (N,C,K): the key that an erase reads with; k itself but in a moving frame
    v: Tensor  # (N,C,V)
    e: Tensor | None  # (N,C,1)
    w: Tensor | None  # (N,C,1)
    gate: Tensor | None  # (N,C,1) float64
    decay: Decay | None

    def pairs(self, products: Tensor, diagonal: int = 0) -> Tensor:
        """Decayed products of token pairs. Pairs that look ahead are cut first: an infinite product there makes no NaN."""
        products = products.tril_(diagonal)
        return products if self.decay is None else products.mul_(self.decay.pair)

    def since_start(self, rows: Tensor) -> Tensor:
        return rows if self.decay is None else rows * self.decay.start

    def until_end(self, rows: Tensor) -> Tensor:
        return rows if self.decay is None else rows * self.decay.end

    def carried_(self, memory: Tensor) -> Tensor:
        return memory if self.decay is None else memory.mul_(self.decay.total)


class Solved(NamedTuple):
    """What the outputs and the gradients of a chunk are both made from."""

    scores: Tensor  # (N,C,C): decayed tril(Q K^T)
    written: Tensor  # (N,C,V): U
    erase: Tensor | None = None  # (N,C,C): decayed tril(P K^T, -1)
    inverse: Tensor | None = None  # (N,C,C): (I + e erase)^-1
    recalled: Tensor | None = None  # (N,C,V): decayed P W_0


class Grads(NamedTuple):
    q: Tensor
    k: Tensor
    p: Tensor | None
    v: Tensor
    e: Tensor | None
    w: Tensor | None
    f: Tensor | None  # (N,C,1) of the gate of ``Decay``
    memory: Tensor


def solve(c: Chunk, memory: Tensor, inverse: Tensor | None = None) -> Solved:
    scores = c.pairs(torch.bmm(c.q, c.k.mT))
    written = c.v if c.w is None else c.w * c.v
    if c.e is None:
        return Solved(scores, written)
    erase = c.pairs(torch.bmm(c.p, c.k.mT), diagonal=-1)
    recalled = c.since_start(torch.bmm(c.p, memory))
    if inverse is None:
        eye = torch.eye(erase.shape[-1], dtype=erase.dtype, device=erase.device).expand_as(erase)
        inverse = torch.linalg.solve_triangular(c.e * erase, eye, upper=False, unitriangular=True)
    return Solved(scores, torch.bmm(inverse, written - c.e * recalled), erase, inverse, recalled)


def outputs(c: Chunk, s: Solved, memory: Tensor) -> Tensor:
    return torch.bmm(c.since_start(c.q), memory).baddbmm_(s.scores, s.written)


def final_memory(c: Chunk, s: Solved, memory: Tensor) -> Tensor:
    """In place."""
    return c.carried_(memory).baddbmm_(c.until_end(c.k).mT, s.written)


def backward(c: Chunk, s: Solved, memory: Tensor, dy: Tensor, dfinal: Tensor) -> Grads:
    """Gradients of one chunk from those of its outputs, dy (N,C,V), and of its final memory, dfinal (N,K,V), which is used up."""
    dwritten = torch.bmm(s.scores.mT, dy).baddbmm_(c.until_end(c.k), dfinal)
    dsource = dwritten if c.e is None else torch.bmm(s.inverse.mT, dwritten)  # of w V - e recalled
    dv = dsource if c.w is None else c.w * dsource
    dw = None if c.w is None else (dsource * c.v).sum(-1)

    dscores = torch.bmm(dy, s.written.mT)
    dq_start = c.since_start(torch.bmm(dy, memory.mT))
    dk_end = c.until_end(torch.bmm(s.written, dfinal.mT))
    dp = de = df = derase = drecalled = None
    if c.e is not None:
        derase = torch.bmm(dsource, s.written.mT).neg_()
        drecalled = -c.e * dsource
        de = (derase * s.erase).sum(-1) - (dsource * s.recalled).sum(-1)
        derase.mul_(c.e)
    if c.decay is not None:
        df = scalar_gate_gradient(c, s, memory, dfinal, dscores, dq_start, dk_end, derase, drecalled)

    dmemory = c.carried_(dfinal).baddbmm_(c.since_start(c.q).mT, dy)
    dscores = c.pairs(dscores)
    dq = dq_start.baddbmm_(dscores, c.k)
    dk = dk_end.baddbmm_(dscores.mT, c.q)
    if c.e is not None:
        dmemory.baddbmm_(c.since_start(c.p).mT, drecalled)
        derase = c.pairs(derase, diagonal=-1)
        dp = torch.bmm(c.since_start(drecalled), memory.mT).baddbmm_(derase, c.k)
        dk.baddbmm_(derase.mT, c.p)
    return Grads(dq, dk, dp, dv, de, dw, df, dmemory)


def scalar_gate_gradient(c: Chunk, s: Solved, memory, dfinal, dscores, dq_start, dk_end, derase, drecalled):
    """(N,C,1) in float64. Each decayed quantity adds gradient x itself where its span ends and takes it off where the
    span starts; the same fp32 numbers in float64 sums, so that what does not span a gate cancels exactly and a gate of 1e-6
    still gets its gradient right."""
    pair = dscores * s.scores
    starting = (dq_start * c.q).sum(-1).double()
    if derase is not None:
        pair += derase * s.erase
        starting += (drecalled * s.recalled).sum(-1)
    ending = (dk_end * c.k).sum(-1).double()
    dprefix = pair.sum(-1, dtype=torch.float64) - pair.sum(-2, dtype=torch.float64) + starting - ending
    carried = (memory * dfinal * c.decay.total).sum((-2, -1)).double()
    return gate_gradient(dprefix.unsqueeze(-1), (ending.sum(1) + carried).unsqueeze(-1), c.gate)


class Still:
    """No change of variables: at most one gate per token."""

    def __init__(self, f: Tensor | None, z: None, dtype: torch.dtype):
        self.f = f
        self.decay = None if f is None else Decay.of(f, dtype)

    def enter(self, q, k, v, e, w, memory) -> tuple[Chunk, Tensor]:
        return Chunk(q, k, k, v, e, w, self.f, self.decay), memory

    def outputs(self, y: Tensor) -> Tensor:
        return y

    def leave(self, memory: Tensor) -> Tensor:
        return memory

    def backward(self, c: Chunk, s: Solved, memory: Tensor, dy: Tensor, dfinal: Tensor) -> tuple[Grads, None]:
        g = backward(c, s, memory, dy, dfinal)
        return g if g.p is None else g._replace(k=g.k.add_(g.p)), None


class Frame:
    """The moving frame of one gate per channel: keys measured by what is left of them at the chunk's end, values by what they
    were worth at its start, so that no product of the two leaves the range of float64."""

    def __init__(self, f: Tensor | None, z: Tensor | None, dtype: torch.dtype):
        still = torch.ones_like((f if z is None else z)[:1, :, :1])
        self.f, self.z = still if f is None else f, still if z is None else z
        products = self.f.cumprod(1)
        self.carried_keys = products[:, -1:].mT  # (N,K,1)
        self.keys = products[:, -1:] / products
        self.values = self.z.cumprod(1)
        self.carried_values = self.values[:, -1:]  # (N,1,V)

    def enter(self, q, k, v, e, w, memory) -> tuple[Chunk, Tensor]:
        p = k if e is None else k / self.keys
        return Chunk(q / self.keys, k * self.keys, p, v / self.values, e, w, None, None), memory * self.carried_keys

    def outputs(self, y: Tensor) -> Tensor:
        return y.mul_(self.values)

    def leave(self, memory: Tensor) -> Tensor:
        return memory.mul_(self.carried_values)

    def backward(self, c: Chunk, s: Solved, memory: Tensor, dy: Tensor, dfinal: Tensor) -> tuple[Grads, Tensor]:
        dy, dfinal = dy * self.values, dfinal.mul_(self.carried_values)
        final = final_memory(c, s, memory.clone()).mul_(dfinal)
        g = backward(c, s, memory, dy, dfinal)
        dkeys = (c.q * g.q).addcmul_(c.k, g.k, value=-1)
        dvalues = outputs(c, s, memory).mul_(dy).addcmul_(c.v, g.v, value=-1)
        dk = g.k.mul_(self.keys)
        if g.p is not None:
            dkeys.addcmul_(c.p, g.p)
            dk += g.p / self.keys
        df = gate_gradient(dkeys, final.sum(-1), self.f)
        dz = gate_gradient(dvalues, final.sum(-2), self.z)
        return g._replace(q=g.q.div_(self.keys), k=dk, v=g.v.div_(self.values), f=df, memory=g.memory.mul_(self.carried_keys)), dz


class ChunkScan(torch.autograd.Function):
    """The recurrence over T. Keeps the inputs, and per chunk the memory before it and the inverse that its erase needed."""

    @staticmethod
    def forward(ctx, q, k, v, f, z, e, w, memory, keep: bool):
        operands = (q, k, v, f, z, e, w)
        y, memories, inverses = torch.empty_like(v), [], []
        carried = memory.flatten(0, 1).clone()
        for span in spans(q.shape[2]):
            frame, chunk, start = open_chunk(operands, span, carried, memory.dtype)
            solved = solve(chunk, start)
            if keep:
                memories.append(carried.to(memory.dtype, copy=True))
                inverses.append(solved.inverse)
            y[:, :, span] = frame.outputs(outputs(chunk, solved, start)).unflatten(0, v.shape[:2])
            carried = frame.leave(final_memory(chunk, solved, start))
        ctx.save_for_backward(*operands, *memories, *inverses)
        ctx.set_materialize_grads(False)
        return y, carried.to(memory.dtype).unflatten(0, v.shape[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dmemory):
        operands, kept = ctx.saved_tensors[:7], ctx.saved_tensors[7:]
        sequences, pieces = operands[0].shape[:2], spans(operands[0].shape[2])
        memories, inverses = kept[: len(pieces)], kept[len(pieces) :]
        grads = [None if x is None else torch.empty_like(x) for x in operands]
        dtype = memories[0].dtype
        dmemory = torch.zeros_like(memories[0]) if dmemory is None else dmemory.flatten(0, 1).clone()
        for span, memory, inverse in zip(reversed(pieces), reversed(memories), reversed(inverses)):
            frame, chunk, start = open_chunk(operands, span, memory, dtype)
            dy_chunk = torch.zeros_like(chunk.v) if dy is None else dy[:, :, span].to(chunk.v.dtype).flatten(0, 1)
            g, dz = frame.backward(chunk, solve(chunk, start, inverse), start, dy_chunk, dmemory.to(chunk.v.dtype))
            for grad, part in zip(grads, (g.q, g.k, g.v, g.f, dz, g.e, g.w)):
                if grad is not None:
                    part = part.unflatten(0, sequences)
                    grad[:, :, span] = part if grad.dim() == part.dim() else part.squeeze(-1)
            dmemory = g.memory
        return *grads, dmemory.to(dtype).unflatten(0, sequences), None


def spans(tokens: int) -> list[slice]:
    return [slice(t, min(t + CHUNK, tokens)) for t in range(0, tokens, CHUNK)]


def open_chunk(operands, span: slice, memory: Tensor, dtype: torch.dtype) -> tuple[Still | Frame, Chunk, Tensor]:
    """Cuts one chunk out, folds (B,H) into N, and enters the frame that its gates call for. Gates become float64."""
    q, k, v, f, z, e, w = (None if x is None else x[:, :, span].flatten(0, 1) for x in operands)
    per_channel = z is not None or (f is not None and f.dim() == 3)
    work = torch.float64 if per_channel else dtype
    q, k, v = (x.to(work) for x in (q, k, v))
    e, w = (None if x is None else x.to(work).unsqueeze(-1) for x in (e, w))
    f, z = (None if x is None else x.clamp(min=SMALLEST_GATE).double() for x in (f, z))
    f = f.unsqueeze(-1) if f is not None and f.dim() == 2 else f
    frame = (Frame if per_channel else Still)(f, z, work)
    return frame, *frame.enter(q, k, v, e, w, memory.to(work))


def chunk_form(q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients, memory: Tensor) -> tuple[Tensor, Tensor]:
    """q, k (B,H,T,K), v (B,H,T,V), memory (B,H,K,V) -> y (B,H,T,V) in v's dtype, final memory; computed in memory's dtype."""
    if coefficients.z is not None and coefficients.e is not None:
        raise ValueError("a rule with both a value-side decay z and an erase e has no chunk form; use backend='recurrent'")
    inputs = (q, k, v, *coefficients, memory)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return ChunkScan.apply(*inputs, keep)
