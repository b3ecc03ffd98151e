"""The memory carried through chunks that lie side by side, forwards, and its gradient carried backwards.

Only these few small products wait for the chunk before; ``chunk`` computes the rest for all chunks at once. The first dimension of
everything is that of the chunks, in order, times that of the sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .chunk import Carried, Chunk, Solved


class Frame(NamedTuple):
    """What the change of variables of ``frames`` makes of the memory: its rows where a chunk starts, its columns where it ends."""

    keys: Tensor | None = None  # (N,K,1)
    values: Tensor | None = None  # (N,1,V)


def scaled(x: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    x = x.to(dtype)
    return x if factor is None else x * factor


def chunks(c: Chunk, memory: Tensor) -> int:
    """How many chunks lie side by side."""
    return len(c.q) // len(memory) if len(memory) else 1


def shares(count: int, *tensors: Tensor | None) -> list[tuple[Tensor | None, ...]]:
    """The share of each chunk in all tensors; each has the whole of a tensor with one row."""
    return list(zip(*([x] * count if x is None or x.shape[0] == 1 else x.chunk(count) for x in tensors)))


def plus_decayed(added: Tensor, memory: Tensor, total: Tensor | None) -> Tensor:
    return added + memory if total is None else torch.addcmul(added, memory, total)


def forwards(c: Chunk, s: Solved, memory: Tensor, frame: Frame) -> tuple[Tensor, Carried, Tensor]:
    """memory (B,K,V) before the first chunk -> the memory before each, what the chunks make of it, the memory after the last."""
    dtype, work, count = memory.dtype, c.q.dtype, chunks(c, memory)
    ends, totals = c.until_end(c.k).mT, None if c.decay is None else c.decay.total
    if c.e is None:
        parts = shares(count, *frame, totals, torch.bmm(ends, s.source))
    else:
        parts = shares(count, *frame, totals, s.source, ends, s.inverse, c.e * c.since_start(c.p))
    before, starts, written = [], [], []
    for keys, values, total, source, *erasing in parts:
        before.append(memory)
        memory = scaled(memory, keys, work)
        starts.append(memory)
        if erasing:
            end, inverse, read = erasing
            written.append(torch.bmm(inverse, torch.baddbmm(source, read, memory, alpha=-1)))
            memory = torch.baddbmm(memory if total is None else memory * total, end, written[-1])
        else:
            memory = plus_decayed(source, memory, total)
        memory = scaled(memory, values, work).to(dtype)
    return torch.cat(before), Carried(torch.cat(starts), torch.cat(written) if written else s.source), memory


def backwards(c: Chunk, s: Solved, dy: Tensor, dmemory: Tensor, frame: Frame) -> tuple[Tensor, Tensor, Tensor]:
    """dmemory (B,K,V) after the last chunk -> the gradients of the memory after each chunk, in its frame, of what the chunks solve
    for, and of the memory before the first."""
    dtype, work, count = dmemory.dtype, c.q.dtype, chunks(c, dmemory)
    ends, totals = c.until_end(c.k), None if c.decay is None else c.decay.total
    dwritten, dreads = torch.bmm(s.scores.mT, dy), torch.bmm(c.since_start(c.q).mT, dy)
    if c.e is None:
        parts = shares(count, *frame, totals, dreads)
    else:
        parts = shares(count, *frame, totals, dreads, dwritten, ends, s.inverse.mT, (c.e * c.since_start(c.p)).mT)
    dfinals, dsources = [], []
    for keys, values, total, dread, *erasing in reversed(parts):
        dmemory = scaled(dmemory, values, work)
        dfinals.append(dmemory)
        if erasing:
            dw, end, inverse, read = erasing
            dsources.append(torch.bmm(inverse, torch.baddbmm(dw, end, dmemory)))
            dread = torch.baddbmm(dread, read, dsources[-1], alpha=-1)
        dmemory = scaled(plus_decayed(dread, dmemory, total), keys, work).to(dtype)
    dfinal = torch.cat(dfinals[::-1])
    return dfinal, torch.cat(dsources[::-1]) if dsources else dwritten.baddbmm_(ends, dfinal), dmemory
