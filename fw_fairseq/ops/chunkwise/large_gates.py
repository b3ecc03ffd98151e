"""Chunks with one gate per channel, none of them small, and without erase: the same as ``ChannelGates``, in fp32 and faster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .chunk import gate_gradient
from .frames import ChunkInputs, Outcome

SMALLEST_FP32_GATE = 1e-3  # from here on fp32 holds the products of 8 gates, and their gradient to about 1e-6 / gate
FP32_CHUNK = 16  # tokens; two side by side take the place of one chunk


class Products(NamedTuple):
    """Products of fp32 gates over short chunks: relative to the middle and back, since the start, until the end, over all."""

    middle: Tensor  # (N,R,C,X)
    back: Tensor  # (N,R,C,X)
    start: Tensor  # (N,R,C,X)
    end: Tensor  # (N,R,C,X)
    total: Tensor  # (N,R,1,X)

    @classmethod
    def of(cls, *gates: Tensor) -> list[Products]:
        """The products of several gates at once."""
        halves = torch.cat(gates, dim=-1).unflatten(2, (2, -1)).cumprod(3)
        first = halves[:, :, 0, -1:].clone()
        halves[:, :, 0].div_(first)
        middle = halves.flatten(2, 3)
        back, last = middle.reciprocal(), middle[:, :, -1:]
        joint = (middle, back, middle * first, back * last, first * last)
        return [cls(*parts) for parts in zip(*(x.split([gate.shape[-1] for gate in gates], dim=-1) for x in joint))]


class LargeChannelGates:
    """R chunks of FP32_CHUNK tokens side by side. Pairs of tokens are weighed relative to the middle of their chunk, reads from the
    memory relative to its start, and writes into the memory relative to its end, so that no factor of those two exceeds 1. Only
    the memory is carried from chunk to chunk."""

    dtype: torch.dtype | None = None
    side_by_side = False

    def __init__(self, given: ChunkInputs, memory: Tensor) -> None:
        opened: Any = (None if x is None else x.unflatten(1, (-1, FP32_CHUNK)) for x in given.to(memory.dtype))
        self.q, self.k, self.source, self.f, self.z, _, self.w = opened
        self.v = self.source if self.w is None else self.source * self.w
        self.key, self.value = Products.of(self.f, self.z)
        self.q_middle, self.q_start = self.q * self.key.middle, self.q * self.key.start
        self.k_back, self.k_end = self.k * self.key.back, self.k * self.key.end
        self.v_back, self.v_end = self.v * self.value.back, self.v * self.value.end
        self.scores = (self.q_middle @ self.k_back.mT).tril_()
        self.starts, self.final = self.chain(memory, self.k_end.mT @ self.v_end)

    def chain(self, memory: Tensor, added: Tensor, backwards: bool = False) -> tuple[Tensor, Tensor]:
        """Carries a memory (N,K,V) over the chunks, each of which adds its share (N,R,K,V): the memory that each chunk starts from,
        and the last one."""
        given = torch.empty_like(added)
        for r in reversed(range(added.shape[1])) if backwards else range(added.shape[1]):
            given[:, r] = memory
            memory = torch.addcmul(added[:, r], memory * self.key.total[:, r].mT, self.value.total[:, r])
        return given, memory

    @classmethod
    def forward(cls, given: ChunkInputs, memory: Tensor) -> Outcome:
        c = cls(given, memory)
        y = (c.scores @ c.v_back).mul_(c.value.middle).addcmul_(c.q_start @ c.starts, c.value.start)
        return y.flatten(1, 2), c.final, None, memory

    @classmethod
    def backward(
        cls, given: ChunkInputs, memory: Tensor, _: object, dy: Tensor, dfinal: Tensor
    ) -> tuple[Sequence[Tensor | None], Tensor]:
        c = cls(given, memory)
        key, value = c.key, c.value
        dy = dy.unflatten(1, (-1, FP32_CHUNK))
        dy_middle, dy_start = dy * value.middle, dy * value.start
        dscores = (dy_middle @ c.v_back.mT).tril_(-1)
        dends, dmemory = c.chain(dfinal, c.q_start.mT @ dy_start, backwards=True)
        own, scores = c.scores.diagonal(dim1=-2, dim2=-1).unsqueeze(-1), c.scores.tril(-1)

        # No gate decays a token's read of itself or the last token's write into the memory: the gates' gradients leave both out.
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
