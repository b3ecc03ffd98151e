"""The kernel family with decay per channel and erase (rules kda, gdn2, rwkv7): what it supports, how ``cuda/channel_delta.cu`` and
``cuda/channel_delta_backward.cu`` are cut into tiles, and their launches. ``families`` has the contract of a family.

fp16 inputs are multiplied in tf32, as in the other families. Feature maps run before the kernels.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...feature_maps import AS_IS, RowMap
from . import launch
from .common import (
    OLDEST,
    PRECISIONS,
    TYPES,
    held_bytes,
    in_units,
    pack_params,
    precision_of,
    remembered,
    round_up,
    rows_aligned,
    tile_bytes,
)
from .delta import CHUNK, Sizes, Tiling, run_backward, run_forward

LARGEST_KEY = 256
FIRSTS = 112  # bytes of the addresses that the backward keeps in shared memory

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


class Macros(NamedTuple):
    """The macros of a kernel."""

    dtype: torch.dtype
    key: int  # FW_K
    tiling: Tiling
    tiles: int  # of V
    precision: int
    rows: bool  # whether e is the rows that an erase reads with
    w: bool


class Variant(Sizes, Macros):
    """The macros of a kernel, and the sizes that follow from them."""

    @classmethod
    def of(cls, q, v, e, w, precision: str) -> Variant:
        return cls.of_sizes(q.dtype, q.shape[3], v.shape[3], e.dim() == 4, w is not None, precision, held_bytes(q.device))

    @classmethod
    @remembered
    def of_sizes(cls, dtype, key: int, value: int, rows: bool, w: bool, precision: str, held: int) -> Variant:
        precision = precision_of(dtype, precision)
        size = 2 if precision == "bf16" else 4
        tiling = next(tiling for (widest, bytes_), tiling in TABLE.items() if widest >= key and bytes_ == size)
        while True:
            variant = cls.cut(dtype, key, value, rows, w, PRECISIONS[precision], tiling)
            if variant.forward_bytes() > held and tiling.span > CHUNK:
                tiling = tiling._replace(span=CHUNK)
            elif variant.backward_bytes() > held and tiling.part > CHUNK:
                tiling = tiling._replace(part=CHUNK)
            elif variant.most_bytes() > held and tiling.value > 16:
                tiling = tiling._replace(value=tiling.value // 2)
            else:
                return variant

    @classmethod
    def cut(cls, dtype, key: int, value: int, rows: bool, w: bool, precision: int, tiling: Tiling) -> Variant:
        tiles = -(-value // tiling.value)
        tiling = tiling._replace(value=round_up(-(-value // tiles), 16))
        return cls(dtype, round_up(key, 16 * tiling.ksplit), tiling, tiles, precision, rows, w)

    def stage_bytes(self, span: int) -> int:
        """The rows of a span but those of dy, and its gates."""
        gates = tile_bytes(span, self.key, torch.float32)
        keys, values = 2 * tile_bytes(span, self.key, self.operand), tile_bytes(span, self.tiling.value, self.dtype)
        return keys + values + gates + (gates if self.rows else 16) + 8 * span

    def span_bytes(self, span: int) -> int:
        """The bytes of what both kernels make of a span: rows that erases read with, scores, inverse, products of gates."""
        pairs = tile_bytes(span, CHUNK, torch.float32) + tile_bytes(span, CHUNK, self.operand)
        return tile_bytes(span, self.key, self.operand) + pairs + 4 * span // CHUNK * self.key

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
        stage = self.stage_bytes(span) + tile_bytes(span, value, operand)
        memories = (chunks + 1) * (tile_bytes(value, self.key, operand) + tile_bytes(value, CHUNK, operand))
        pairs = tile_bytes(span, CHUNK, torch.float32) + tile_bytes(CHUNK, CHUNK, operand)
        columns = warps * (4 * tile_bytes(CHUNK, CHUNK, torch.float32) + 4 * CHUNK)
        sums = 4 * CHUNK * chunks * (1 + 2 * warps)
        return stage + FIRSTS + self.span_bytes(span) + memories + pairs + columns + sums + self.sums_bytes(2)

    def most_bytes(self) -> int:
        return max(self.forward_bytes(), self.backward_bytes())

    def launch(self, launcher, pass_: str, views: dict, pointers: dict) -> None:
        source, span, shared = {
            "forward": ("channel_delta.cu", self.tiling.span, self.forward_bytes()),
            "backward": ("channel_delta_backward.cu", self.tiling.part, self.backward_bytes()),
        }[pass_]
        q = views["q"]
        B, H = q.shape[:2]
        defines = {
            "FW_IN": TYPES[self.dtype],
            "FW_K": self.key,
            "FW_V": self.tiling.value,
            "FW_F": 0,
            "FW_E": 1 + self.rows,
            "FW_W": int(self.w),
            "FW_PRECISION": self.precision,
            "FW_KSPLIT": self.tiling.ksplit,
            "FW_SPAN": span,
            "FW_PART": self.tiling.part,
            "FW_ALIGNED": int(aligned(views)),
            "FW_PARTIAL": int(self.tiles > 1),
            "FW_SHARED": shared,
        }
        params = pack_params(views, pointers, q.shape[3])
        launcher(source, f"channel_delta_{pass_}", defines, (B * H, self.tiles), (32 * self.warps,), params, shared, q.device)


def aligned(views: dict[str, Tensor | None]) -> bool:
    """Whether all rows can be moved 16 bytes at a time, those of the gates too."""
    gates = [views["f"], *(views[name] for name in ("e",) if views[name].dim() == 4)]  # their gradients are laid out alike
    return rows_aligned(views) and all(map(in_units, gates))


COMPUTES = ("f per channel", "e per token", "e per channel", "w per token")
NEEDS = ("f per channel",)
DIVIDES = False


def supported(q: Tensor, k: Tensor, v: Tensor, f, z, e, w, row_map: RowMap = AS_IS) -> str | None:
    key = q.shape[-1]
    if row_map != AS_IS:
        return "backend='cuda' applies feature maps before the kernels for decay per channel with erase"
    if key > LARGEST_KEY:
        return f"backend='cuda' has kernels for decay per channel with erase for keys up to {LARGEST_KEY} wide, not {key}"
    if launch.current().capability(q.device) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return f"backend='cuda' has kernels for decay per channel with erase for compute capability {oldest} and higher only"
    variant = Variant.of(q, v, e, w, "bf16" if q.dtype == torch.bfloat16 else "exact")
    needed, held = variant.most_bytes(), held_bytes(q.device)
    if needed > held:
        return f"backend='cuda' needs {needed} bytes of shared memory for {q.dtype} keys {key} wide; this device has {held}"
    return None


def saved_like(q, k, v, f, z, e, w, memory, precision: str, row_map: RowMap = AS_IS):
    variant = Variant.of(q, v, e, w, precision)
    return [(variant.borders_shape(*q.shape[:3]), variant.operand)]


def forward(launcher, q, k, v, f, z, e, w, memory, precision: str, keep: bool = True, row_map: RowMap = AS_IS):
    return run_forward(Variant.of(q, v, e, w, precision), launcher, q, k, v, f, e, w, memory, keep)


def backward(launcher, q, k, v, f, z, e, w, memory, saved, dy, dmemory, precision: str, row_map: RowMap = AS_IS):
    return run_backward(Variant.of(q, v, e, w, precision), launcher, q, k, v, f, e, w, memory, saved, dy, dmemory)
