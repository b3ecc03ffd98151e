"""Several chunks side by side. What needs no memory is computed for all of them at once; only the memory goes from one to the next:

    U_r = T_r w V - T_r e P_r W_r,      W_{r+1} = W_r + K_r^T U_r

with T_r the inverse of chunk r, and its decay in all products.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .chunk import Chunk, Grads, Solved, backward, final_memory, invert, solve


class Row(NamedTuple):
    """R chunks of as many tokens each: the tensors of ``chunk`` are (R N,C,X), and what a moving frame multiplies a memory
    with where a chunk starts and where it ends, None for nothing, is (R N,K,1) and (R N,1,V)."""

    chunk: Chunk
    keys: Tensor | None = None
    values: Tensor | None = None

    def start(self, memory: Tensor) -> Tensor:
        """The memories (R N,K,V) in the frames of their chunks."""
        return memory if self.keys is None else memory * self.keys

    def since_start(self, rows: Tensor) -> Tensor:
        """What rows (R N,C,K) of the frame read of a memory out of it."""
        rows = self.chunk.since_start(rows)
        return rows if self.keys is None else rows * self.keys.mT

    def reads(self, inverse: Tensor | None) -> Tensor | None:
        """What a memory before a chunk takes away from what is written there, for each feature of its keys: T e P, (R N,C,K)."""
        return None if inverse is None else torch.bmm(inverse, self.since_start(self.chunk.e * self.chunk.p))

    def parts(self, sequences: int, *tensors: Tensor | None) -> list[Any]:
        """The tensors of each chunk of so many sequences and heads."""
        rows = self.chunk.q.shape[0]
        nothing = rows // sequences * [None]
        return list(zip(*(nothing if x is None else x.expand(rows, *x.shape[1:]).split(sequences) for x in tensors)))

    def total(self) -> Tensor | None:
        """The decay of a memory over each chunk."""
        decay = self.chunk.decay
        return self.keys if decay is None else decay.total if self.keys is None else decay.total * self.keys


def forward(row: Row, memory: Tensor) -> tuple[Solved, Tensor, Tensor]:
    """The solved chunks, the memories (R N,K,V) before each, and the one after the last, for a memory (N,K,V) before the first."""
    c = row.chunk
    if c.q.shape[0] == memory.shape[0]:
        start = row.start(memory)
        solved = solve(c, start)
        last = final_memory(c, solved, start.clone())
        return solved, memory, last if row.values is None else last.mul_(row.values)
    solved = invert(c)
    if c.e is not None:
        solved = solved._replace(written=torch.bmm(solved.inverse, solved.written))
    starts = memory.new_empty(c.q.shape[0], *memory.shape[1:])
    ends = c.until_end(c.k).mT
    parts = row.parts(memory.shape[0], starts, solved.written, row.reads(solved.inverse), ends, row.total(), row.values)
    for start, written, read, end, total, values in parts:
        start.copy_(memory)
        if read is not None:
            written.baddbmm_(read, memory, alpha=-1)
        memory = (memory.clone() if total is None else memory * total).baddbmm_(end, written)
        memory = memory if values is None else memory.mul_(values)
    return solved, starts, memory


def gradients(row: Row, s: Solved, starts: Tensor, dy: Tensor, dfinal: Tensor) -> tuple[Grads, Tensor]:
    """The gradients of the chunks and of the memory before the first, (N,K,V); and those of the memories after each, (R N,K,V), in
    their frames. starts: the memories before each, in their frames."""
    c = row.chunk
    if c.q.shape[0] == dfinal.shape[0]:
        dfinal = dfinal if row.values is None else dfinal * row.values
        g = backward(c, s, starts, dy, dfinal.clone())
        return (g if row.keys is None else g._replace(memory=g.memory.mul_(row.keys))), dfinal
    dwritten, added, dends = torch.bmm(s.scores.mT, dy), torch.bmm(row.since_start(c.q).mT, dy), torch.empty_like(starts)
    parts = row.parts(dfinal.shape[0], dends, dwritten, added, row.reads(s.inverse), c.until_end(c.k), row.total(), row.values)
    for dend, dwrite, add, read, end, total, values in reversed(parts):
        torch.mul(dfinal, 1 if values is None else values, out=dend)
        dwrite.baddbmm_(end, dend)
        dfinal = add.add_(dend) if total is None else add.addcmul_(dend, total)
        if read is not None:
            dfinal.baddbmm_(read.mT, dwrite, alpha=-1)
    return backward(c, s, starts, dy, dends, dwritten)._replace(memory=dfinal), dends
