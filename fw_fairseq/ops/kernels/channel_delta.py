"""The kernel family with decay per channel and erase (rules kda, gdn2, rwkv7): what it supports, how ``cuda/channel_delta.cu``,
``cuda/channel_delta_adjoint.cu`` and ``cuda/channel_delta_backward.cu`` are cut into tiles, and their launches.

fp16 inputs are multiplied in tf32, as in the other families. Feature maps run before the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...feature_maps import AS_IS
from .compiler import Launcher
from .delta import CHUNK, FIRSTS, FP32, LONGEST_SPAN, ErasingKernel, Tiling
from .family import Family, Gradients, Operands, Results
from .launch import (
    IN_TF32,
    held_bytes,
    in_units,
    remembered,
    round_up,
    rows_aligned,
    tile_bytes,
    why_not_held,
    why_not_wide,
)

LARGEST_KEY = 256

# The widest key a row is for, and bytes of an operand in shared memory. Where a device has less of it than that takes, parts are
# shorter and tiles of V narrower.
TABLE = {
    (64, 2): Tiling(64, 1, 32, 32),
    (128, 2): Tiling(128, 1, 32, 16),
    (LARGEST_KEY, 2): Tiling(64, 2, 16, 16),
    (64, 4): Tiling(64, 1, 16, 16),
    (128, 4): Tiling(64, 2, 16, 16),
    (LARGEST_KEY, 4): Tiling(32, 4, 16, 16),
}


class ChannelKernel(ErasingKernel):
    """With gates per channel."""

    @classmethod
    def of(cls, x: Operands) -> ChannelKernel:
        assert x.e is not None
        given = x.e.dim() == 4, x.w is not None, IN_TF32[x.precision], held_bytes(x.q.device)
        return cls.of_sizes(x.q.dtype, x.q.shape[3], x.v.shape[3], *given)

    @classmethod
    @remembered
    def of_sizes(cls, dtype: torch.dtype, key: int, value: int, rows: bool, w: bool, precision: str, held: int) -> ChannelKernel:
        size = 2 if precision == "bf16" else 4
        tiling = next(tiling for (widest, operand), tiling in TABLE.items() if widest >= key and operand == size)
        while True:
            tiles = -(-value // tiling.value)
            cut, wide = tiling._replace(value=round_up(-(-value // tiles), 16)), round_up(key, 16 * tiling.ksplit)
            kernel = cls(dtype, wide, cut, tiles, precision, False, rows, w, key, key, AS_IS, held)
            if kernel.forward_bytes() > held and tiling.span > CHUNK:
                tiling = tiling._replace(span=CHUNK)
            elif kernel.backward_bytes() > held and tiling.part > CHUNK:
                tiling = tiling._replace(part=CHUNK)
            elif kernel.most_bytes() > held and tiling.value > 16:
                tiling = tiling._replace(value=tiling.value // 2)
            else:
                return kernel.with_longest_span()

    def with_longest_span(self) -> ChannelKernel:
        """The same with more tokens in shared memory, where as many blocks still fit a multiprocessor."""
        longer, blocks = self._replace(tiling=self.tiling._replace(span=LONGEST_SPAN)), 2 if self.key <= 64 else 1
        able = self.tiling.ksplit == 1 and self.operand.itemsize == 2
        return longer if able and longer.forward_bytes() <= self.held // blocks - 1024 else self

    def stage_bytes(self, span: int) -> int:
        """The rows of a span but those of dy, and its gates."""
        gates = tile_bytes((span, self.key, FP32))
        rows = tile_bytes((2 * span, self.key, self.operand), (span, self.tiling.value, self.dtype))
        return rows + gates + (gates if self.rows else 16) + 8 * span

    def span_bytes(self, span: int) -> int:
        """The bytes of what both kernels make of a span: rows that erases read with, scores, inverse, products of gates."""
        tiles = (span, CHUNK, FP32), (span, CHUNK, self.operand), (span, self.key, self.operand)
        return tile_bytes(*tiles) + 4 * span // CHUNK * self.key

    @remembered
    def forward_bytes(self) -> int:
        """sizeof(ForwardShared), which the kernel asserts."""
        span = self.tiling.span
        return 2 * self.stage_bytes(span) + self.span_bytes(span) + self.sums_bytes(4)

    @remembered
    def backward_bytes(self) -> int:
        """sizeof(BackwardShared), which the kernel asserts."""
        span, value, operand = self.tiling.part, self.tiling.value, self.operand
        chunks, warps = span // CHUNK, self.warps
        memories = ((chunks + 1) * value, self.key, operand), ((chunks + 1) * value, CHUNK, operand)
        pairs = (span, CHUNK, FP32), (CHUNK, CHUNK, operand)
        columns = (4 * warps * CHUNK, CHUNK, FP32)
        sums = 4 * CHUNK * chunks * (1 + 2 * warps) + 4 * CHUNK * warps
        kept = tile_bytes((span, value, operand), *memories, *pairs, columns)
        return self.stage_bytes(span) + FIRSTS + self.span_bytes(span) + kept + sums + self.sums_bytes(2)

    def most_bytes(self) -> int:
        return max(self.forward_bytes(), self.backward_bytes())

    def pass_macros(self, name: str, tensors: dict[str, Any]) -> tuple[str, int, dict[str, int]]:
        gates = [x for x in (tensors["f"], tensors["e"]) if x is not None and x.dim() == 4]  # their gradients are laid out alike
        more = {"FW_E": 1 + self.rows, "FW_ALIGNED": int(rows_aligned(tensors) and all(map(in_units, gates)))}
        sizes = {"forward": self.forward_bytes, "adjoint": self.adjoint_bytes, "backward": self.backward_bytes}
        return "channel_delta", sizes[name](), more


def supported(x: Operands) -> str | None:
    """``Family.supported``."""
    key = x.q.shape[-1]
    if x.row_map != AS_IS:
        return "backend='cuda' applies feature maps before the kernels for decay per channel with erase"
    if reason := why_not_wide("for decay per channel with erase", x.q, key, LARGEST_KEY):
        return reason
    return why_not_held(x.q, key, ChannelKernel.of(x).most_bytes())


def saved_like(x: Operands) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """``Family.saved_like``."""
    return ChannelKernel.of(x).saved_like(x.q)


def forward(launcher: Launcher, x: Operands, keep: bool = True) -> Results:
    """``Family.forward``."""
    return ChannelKernel.of(x).run_forward(launcher, x, keep)


def backward(launcher: Launcher, x: Operands, saved: Sequence[Tensor], dy: Tensor, dmemory: Tensor | None) -> Gradients:
    """``Family.backward``."""
    return ChannelKernel.of(x).run_backward(launcher, x, saved, dy, dmemory)


COMPUTES = ("f per channel", "e per token", "e per channel", "w per token")
FAMILY = Family(COMPUTES, ("f per channel",), supported, saved_like, forward, backward)
