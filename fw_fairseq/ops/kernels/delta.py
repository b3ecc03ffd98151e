"""The kernel family with erase (rules delta, gated_delta): what it supports, how ``cuda/delta.cu`` and
``cuda/delta_backward.cu`` are cut into tiles, and their launches. ``families`` has the contract of a family.

fp16 inputs are multiplied in tf32, which holds them exactly. fp16 products would overflow where memories and gradients leave its
range, and bf16 would round the inputs once more.
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
    add_up,
    held_bytes,
    map_defines,
    pack_params,
    precision_of,
    remembered,
    round_up,
    rows_aligned,
    shares_of,
    tile_bytes,
)

CHUNK = 16
LARGEST_KEY = 512
FIRSTS = 112  # bytes of the addresses that the backward keeps in shared memory


class Tiling(NamedTuple):
    """How a block is cut. ``value``: columns of the memory; ``ksplit``: warps that share 16 of them; ``span``: tokens in shared
    memory at a time, twice, in the forward; ``part``: tokens between two saved memories, in shared memory in the backward."""

    value: int
    ksplit: int
    span: int
    part: int


# The widest key a row is for, and bytes of an operand in shared memory. Up to 128 registers a thread for the memory and its
# adjoint; shared memory below 99 KiB (what every device has) except in the last row, and for two blocks a multiprocessor or more.
TABLE = {
    (64, 2): Tiling(64, 1, 64, 32),
    (128, 2): Tiling(64, 1, 32, 32),
    (256, 2): Tiling(32, 2, 32, 16),
    (LARGEST_KEY, 2): Tiling(16, 4, 16, 16),
    (64, 4): Tiling(64, 1, 32, 16),
    (128, 4): Tiling(32, 2, 32, 16),
    (LARGEST_KEY, 4): Tiling(16, 4, 16, 16),
}


class Sizes:
    """A mixin for the variants of both families with erase: what follows from precision, tiling, tiles and key."""

    @property
    def operand(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == 0 else torch.float32

    @property
    def warps(self) -> int:
        return self.tiling.value // 16 * self.tiling.ksplit

    def sums_bytes(self, accumulators: int) -> int:
        return 16 if self.tiling.ksplit == 1 else 2 * self.warps * accumulators * 32 * 16

    def borders_shape(self, B, H, T):
        return B * H * ((T + self.tiling.part - 1) // self.tiling.part), self.tiles * self.tiling.value, self.key


class Macros(NamedTuple):
    """The macros of a kernel."""

    dtype: torch.dtype
    key: int  # FW_K
    tiling: Tiling
    tiles: int  # of V
    precision: int
    f: bool
    w: bool
    row: int  # width of q and k
    row_map: RowMap
    held: int  # bytes of shared memory


class Variant(Sizes, Macros):
    """The macros of a kernel, and the sizes that follow from them."""

    @classmethod
    def of(cls, q, v, f, w, precision: str, row_map: RowMap) -> Variant:
        return cls.of_sizes(q.dtype, q.shape[3], v.shape[3], f is not None, w is not None, precision, row_map, held_bytes(q.device))

    @classmethod
    @remembered
    def of_sizes(cls, dtype, row: int, value: int, f: bool, w: bool, precision: str, row_map: RowMap, held: int) -> Variant:
        precision = precision_of(dtype, precision)
        key = row_map.width(row)
        tiling = next(row for (widest, size), row in TABLE.items() if widest >= key and size == (2 if precision == "bf16" else 4))
        tiles = -(-value // tiling.value)
        tiling = tiling._replace(value=round_up(-(-value // tiles), 16))
        variant = cls(dtype, round_up(key, 16 * tiling.ksplit), tiling, tiles, PRECISIONS[precision], f, w, row, row_map, held)
        if variant.backward_bytes(1) > variant.held:  # by its rows
            variant = variant._replace(tiling=tiling._replace(part=CHUNK))
        return variant

    def rows_bytes(self, rows: int) -> int:
        """The bytes of so many rows of q and k before the feature map."""
        return 2 * tile_bytes(rows, round_up(self.row, 16 // self.dtype.itemsize), self.dtype)

    @remembered
    def forward_bytes(self) -> int:
        """sizeof(ForwardShared), which the kernel asserts."""
        span, value = self.tiling.span, self.tiling.value
        keys = 2 * tile_bytes(span, self.key, self.operand)
        values = tile_bytes(span, value, self.dtype) + 24 * span
        staged = 2 * (keys + values) if self.row_map == AS_IS else 2 * (self.rows_bytes(span) + values) + keys
        solved = tile_bytes(span, CHUNK, torch.float32) + tile_bytes(span, CHUNK, self.operand)
        return staged + solved + self.sums_bytes(4)

    @remembered
    def backward_bytes(self, stages: int) -> int:
        """sizeof(BackwardShared), which the kernel asserts."""
        span, value, operand, mapped = self.tiling.part, self.tiling.value, self.operand, self.row_map != AS_IS
        chunks, memory = span // CHUNK, tile_bytes(value, self.key, operand)
        group, keys = chunks if stages > 1 else 1, 2 * tile_bytes(span, self.key, operand)
        stage = (self.rows_bytes(span) if mapped else keys) + tile_bytes(span, value, operand) + tile_bytes(span, value, self.dtype)
        border = value * self.key * operand.itemsize if stages > 1 else 16
        memories = (chunks + group) * memory + border + (chunks + group) * tile_bytes(value, CHUNK, operand)
        pairs = tile_bytes((chunks + group) * CHUNK, CHUNK, operand)
        solved = tile_bytes(2 * span + (span if self.f else CHUNK), CHUNK, torch.float32)
        ahead = stages > 1 and not mapped and self.warps > (chunks + 1) // 2
        spans = 2 * (tile_bytes(span, CHUNK, torch.float32) if ahead and self.f else 16)
        sums = 4 * chunks * (self.warps * 3 * CHUNK + CHUNK + value + self.warps)
        kept = stages * (stage + 24 * span) + FIRSTS + (keys if mapped else 0) + memories + pairs + solved
        return kept + spans + round_up(sums, 16) + self.sums_bytes(2)

    def stages(self) -> int:
        """2 where the backward has room for two parts, but not at the price of a second block on a multiprocessor."""
        limits = ((self.held - 1024) // 2, self.held)
        return next((n for most in limits for n in (2, 1) if self.backward_bytes(n) <= most), 1)

    def launch(self, launcher, pass_: str, views: dict, pointers: dict) -> None:
        stages = self.stages()
        source, span, shared, more = {
            "forward": ("delta.cu", self.tiling.span, self.forward_bytes(), {}),
            "backward": ("delta_backward.cu", self.tiling.part, self.backward_bytes(stages), {"FW_STAGES": stages}),
        }[pass_]
        q = views["q"]
        B, H = q.shape[:2]
        defines = {
            "FW_IN": TYPES[self.dtype],
            "FW_K": self.key,
            "FW_V": self.tiling.value,
            "FW_F": int(self.f),
            "FW_W": int(self.w),
            "FW_PRECISION": self.precision,
            "FW_KSPLIT": self.tiling.ksplit,
            "FW_SPAN": span,
            "FW_PART": self.tiling.part,
            "FW_ALIGNED": int(rows_aligned(views)),
            "FW_PARTIAL": int(self.tiles > 1),
            "FW_SHARED": shared,
            **more,
            **map_defines(self.row_map, self.row),
        }
        params = pack_params(views, pointers, self.row_map.width(self.row))
        launcher(source, f"delta_{pass_}", defines, (B * H, self.tiles), (32 * self.warps,), params, shared, q.device)


COMPUTES, NEEDS = ("f per token", "e per token", "w per token"), ("e per token",)
DIVIDES = False


def supported(q: Tensor, k: Tensor, v: Tensor, f, z, e, w, row_map: RowMap = AS_IS) -> str | None:
    key = row_map.width(q.shape[-1])
    if key > LARGEST_KEY:
        return f"backend='cuda' has kernels with erase for keys up to {LARGEST_KEY} wide, not {key}"
    return None if q.device.type != "cuda" else unsupported_device(q, v, f, w, row_map)


def unsupported_device(q, v, f, w, row_map: RowMap = AS_IS) -> str | None:
    if launch.current().capability(q.device) < OLDEST:
        return f"backend='cuda' has kernels with erase for compute capability {OLDEST[0]}.{OLDEST[1]} and higher only"
    variant = Variant.of(q, v, f, w, "exact" if q.dtype == torch.float32 else "bf16", row_map)
    needed = max(variant.forward_bytes(), variant.backward_bytes(1))
    if needed > variant.held:
        key = row_map.width(q.shape[-1])
        return f"backend='cuda' needs {needed} bytes of shared memory for {q.dtype} keys {key} wide; this device has {variant.held}"
    return None


def saved_like(q, k, v, f, z, e, w, memory, precision: str, row_map: RowMap = AS_IS):
    variant = Variant.of(q, v, f, w, precision, row_map)
    return [(variant.borders_shape(*q.shape[:3]), variant.operand)]


def forward(launcher, q, k, v, f, z, e, w, memory, precision: str, keep: bool = True, row_map: RowMap = AS_IS):
    return run_forward(Variant.of(q, v, f, w, precision, row_map), launcher, q, k, v, f, e, w, memory, keep)


def backward(launcher, q, k, v, f, z, e, w, memory, saved, dy, dmemory, precision: str, row_map: RowMap = AS_IS):
    return run_backward(Variant.of(q, v, f, w, precision, row_map), launcher, q, k, v, f, e, w, memory, saved, dy, dmemory)


def run_forward(variant, launcher, q, k, v, f, e, w, memory, keep: bool):
    """``Family.forward`` by a variant of this family or of another with erase."""
    y, final = torch.empty_like(v), torch.empty_like(memory)
    saved = (memory.new_empty(variant.borders_shape(*q.shape[:3]), dtype=variant.operand),) if keep else ()
    pointers = {"memory": memory, "final": final, "borders": saved[0] if keep else None}
    variant.launch(launcher, "forward", dict(q=q, k=k, v=v, f=f, e=e, w=w, y=y), pointers)
    return y, final, saved


def run_backward(variant, launcher, q, k, v, f, e, w, memory, saved, dy, dmemory):
    """``Family.backward`` by a variant of this family or of another with erase."""
    inputs = {"q": q, "k": k, "f": f, "e": e, "w": w}
    grads = {f"d{name}": torch.empty_like(x) for name, x in inputs.items() if x is not None}
    shares = {name: shares_of(grad, variant.tiles) for name, grad in grads.items()}
    dv, before = torch.empty_like(v), torch.empty_like(memory)
    pointers = {"dfinal": dmemory, "dmemory": before, "borders": saved[0]}
    variant.launch(launcher, "backward", inputs | shares | {"v": v, "dy": dy, "dv": dv}, pointers)
    for name, grad in grads.items():
        add_up(grad, shares[name])
    return grads["dq"], grads["dk"], dv, grads.get("df"), None, grads["de"], grads.get("dw"), before
