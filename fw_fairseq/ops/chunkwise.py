"""The recurrence in chunks: matrix products inside a chunk, the memory carried from chunk to chunk.

``chunk`` is the mathematics of one chunk, ``frames`` the ways to keep its decay in range; here is the loop over chunks, its plan,
and its autograd. The backward keeps the inputs and one memory per chunk, and recomputes the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..rules import Coefficients
from .autograd import as_written
from .frames import CHUNK, NARROW_GATE, Cut, Frame, Narrow, Still


class Step(NamedTuple):
    """A chunk of some of the sequences."""

    span: slice
    way: type
    sequences: Tensor | None  # their numbers among all (B,H); None: all

    def cut(self, x: Tensor) -> Tensor:
        """(B,H,T,...) -> (N,C,...)"""
        return self.of(x[:, :, self.span].flatten(0, 1))

    def of(self, x: Tensor) -> Tensor:
        return x if self.sequences is None else x[self.sequences]

    def put(self, part: Tensor, whole: Tensor) -> None:
        """Into (B,H,T,...), in place."""
        if self.sequences is None:
            whole[:, :, self.span] = part.unflatten(0, whole.shape[:2])
        else:
            heads = whole.shape[1]
            whole[self.sequences // heads, self.sequences % heads, self.span] = part.to(whole.dtype)

    def carry(self, part: Tensor, memory: Tensor) -> Tensor:
        """The memory of all sequences with that of these."""
        return part if self.sequences is None else memory.index_copy(0, self.sequences, part.to(memory.dtype))


class ChunkScan(torch.autograd.Function):
    """The recurrence over T. Keeps the inputs, and per chunk the memory before it and the inverse that its erase needed."""

    @staticmethod
    @as_written
    def forward(ctx, q, k, v, f, z, e, w, memory, keep: bool):
        operands = (q, k, v, f, z, e, w)
        ctx.plan = plan(operands, memory.dtype)
        y, memories, inverses = torch.empty_like(v), [], []
        carried = memory.flatten(0, 1)
        for step in ctx.plan:
            start = step.of(carried)
            if keep:
                memories.append(start)
            y_chunk, end, inverse = step.way.forward(cut(operands, step), start)
            step.put(y_chunk, y)
            carried = step.carry(end.to(memory.dtype), carried)
            inverses.append(inverse)
        if keep:
            ctx.save_for_backward(*operands, *memories, *inverses)
        ctx.set_materialize_grads(False)
        return y, carried.unflatten(0, v.shape[:2])

    @staticmethod
    @once_differentiable
    @as_written
    def backward(ctx, dy, dmemory):
        operands, kept = ctx.saved_tensors[:7], ctx.saved_tensors[7:]
        memories, inverses = kept[: len(ctx.plan)], kept[len(ctx.plan) :]
        sequences, dtype = operands[0].shape[:2], memories[0].dtype
        grads = [None if x is None else torch.empty_like(x) for x in operands]
        if dmemory is None:
            dmemory = memories[0].new_zeros(sequences.numel(), *memories[0].shape[1:])
        else:
            dmemory = dmemory.flatten(0, 1).clone()  # chunks use it up
        for step, memory, inverse in zip(reversed(ctx.plan), reversed(memories), reversed(inverses)):
            chunk = cut(operands, step)
            work = torch.float64 if step.way is Frame else dtype
            dy_chunk = torch.zeros_like(chunk.v, dtype=work) if dy is None else step.cut(dy).to(work)
            parts, dstart = step.way.backward(chunk, memory, inverse, dy_chunk, step.of(dmemory).to(work))
            for grad, part in zip(grads, parts):
                if grad is not None:
                    step.put(part if grad.dim() == part.dim() + 1 else part.squeeze(-1), grad)
            dmemory = step.carry(dstart, dmemory)
        return *grads, dmemory.to(dtype).unflatten(0, sequences), None


def cut(operands, step: Step) -> Cut:
    return Cut(*(None if x is None else step.cut(x) for x in operands))


def plan(operands, dtype: torch.dtype) -> list[Step]:
    """The chunks in order, each with the way to run it."""
    q, _, _, f, z, e, _ = operands
    chunks = spans(q.shape[2])
    if z is None and (f is None or f.dim() == 3):
        return [Step(span, Still, None) for span in chunks]
    if e is not None or f is None or f.dim() == 3 or z is None or dtype == torch.float64 or not f.numel():
        return [Step(span, Frame, None) for span in chunks]
    smallest = torch.minimum(f.amin(3), z.amin(3)).flatten(0, 1)  # of each token
    whole = smallest.shape[1] // CHUNK
    fits = smallest[:, : whole * CHUNK].unflatten(1, (whole, CHUNK)).amin(2).mT >= NARROW_GATE  # chunk by sequence
    steps = []
    for span, narrow, count in zip(chunks, fits, fits.sum(1).tolist()):
        if 0 < count < len(narrow):
            steps += [Step(span, Narrow, narrow.nonzero().squeeze(1)), Step(span, Frame, (~narrow).nonzero().squeeze(1))]
        else:
            steps.append(Step(span, Narrow if count else Frame, None))
    return steps + [Step(span, Frame, None) for span in chunks[whole:]]


def spans(tokens: int) -> list[slice]:
    return [slice(t, min(t + CHUNK, tokens)) for t in range(0, tokens, CHUNK)]


def chunk_form(q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients, memory: Tensor) -> tuple[Tensor, Tensor]:
    """q, k (B,H,T,K), v (B,H,T,V), memory (B,H,K,V) -> y (B,H,T,V) in v's dtype, final memory; computed in memory's dtype."""
    if coefficients.z is not None and coefficients.e is not None:
        raise ValueError("a rule with both a value-side decay z and an erase e has no chunk form; use backend='recurrent'")
    if coefficients.w is not None and coefficients.w is coefficients.e:  # torch.compile wants no input twice
        coefficients = coefficients._replace(w=coefficients.w.view_as(coefficients.w))
    inputs = (q, k, v, *coefficients, memory)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    return ChunkScan.apply(*inputs, keep)
