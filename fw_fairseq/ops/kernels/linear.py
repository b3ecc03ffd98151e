"""The kernel family without erase and with at most one gate per token (rules sum, gated): what it supports, and the launches of
``cuda/linear.cu`` and ``cuda/linear_backward.cu``. ``families`` has the contract of a family.

fp16 inputs are multiplied in tf32, which holds them exactly. fp16 products would overflow where memories and gradients leave its
range, and bf16 would round the inputs once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...feature_maps import AS_IS, RowMap
from . import launch
from .common import (
    OLDEST,
    PRECISIONS,
    TYPES,
    Divided,
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
    undivided,
)

COMPUTES, NEEDS = ("f per token", "w per token"), ()
DIVIDES = True
LARGEST_KEY, LARGEST_VALUE = 512, 128
FEWEST_WARPS = 4  # of a block, if the key can be split among them
ROWS_OF_A_WARP = 128  # of the memory: 64 fp32 registers a thread, and as many for its operands


class Tile(NamedTuple):
    """The layout of a block: ``value`` columns of the memory, ``slices`` warps to 16 of them, ``chunk`` tokens at a time."""

    value: int
    slices: int
    chunk: int

    @property
    def warps(self) -> int:
        return self.value // 16 * self.slices


def fewest_slices(key: int) -> int:
    """The fewest warps, a power of 2, that hold 16 columns of the memory."""
    slices = 1
    while slices * ROWS_OF_A_WARP < key:
        slices *= 2
    return slices


def tiles_for(key: int, value: int, longest: int) -> Iterator[Tile]:
    """The tiles to try, best first: few tiles of V read q and k seldom, and long chunks wait seldom. ``key`` is FW_K."""
    least = fewest_slices(key)
    width = LARGEST_VALUE // least
    while width > 16 and width // 2 >= value:
        width //= 2
    while width >= 16:
        slices = least
        while width // 16 * slices < FEWEST_WARPS and key % (32 * slices) == 0:
            slices *= 2
        chunk = min(longest, width * slices)
        while chunk >= 16:
            yield Tile(width, slices, chunk)
            chunk //= 2
        width //= 2


class Variant(NamedTuple):
    """The macros of both kernels, and the sizes that follow from them."""

    dtype: torch.dtype
    key: int  # FW_K
    value: int  # width of v
    precision: str
    f: bool
    w: bool
    row: int  # width of q and k
    row_map: RowMap
    held: int  # bytes of shared memory
    sums: bool = False  # reads are divided
    ahead: Tile | None = None  # of the forward
    back: Tile | None = None

    @classmethod
    def of(cls, q, v, f, w, precision: str, row_map: RowMap, sums: bool = False) -> Variant:
        gates, held = (f is not None, w is not None), held_bytes(q.device)
        return cls.of_sizes(q.dtype, q.shape[3], v.shape[3], *gates, precision, row_map, held, sums)

    @classmethod
    @remembered
    def of_sizes(
        cls, dtype, row: int, value: int, f: bool, w: bool, precision: str, row_map: RowMap, held: int, sums: bool
    ) -> Variant:
        precision = precision_of(dtype, precision)
        key = row_map.width(row)
        key = round_up(key, 16 * fewest_slices(key))
        variant = cls(dtype, key, value, precision, f, w, row, row_map, held, sums)
        longest = 64 if precision == "bf16" else 32
        back = variant.choose(longest, lambda tile: variant.backward_bytes(tile, 1))
        ahead = variant.choose(back.chunk, lambda tile: variant.forward_bytes(tile, 1))
        return variant._replace(ahead=ahead, back=back)

    def choose(self, longest: int, needed) -> Tile:
        """The first tile that the device's shared memory holds, the smallest where it holds none."""
        for tile in tiles_for(self.key, self.value, longest):
            if needed(tile) <= self.held:
                break
        return tile

    @property
    def operand(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def tiles(self, tile: Tile) -> int:
        return -(-self.value // tile.value)

    def stage_bytes(self, tile: Tile, values: int) -> int:
        """The rows of q and k of a chunk, ``values`` times those of v, and gates."""
        row, dtype = (self.key, self.operand) if self.row_map == AS_IS else (self.row, self.dtype)
        rows = 2 * tile_bytes(tile.chunk, round_up(row, 16 // dtype.itemsize), dtype)
        return rows + values * tile_bytes(tile.chunk, tile.value, self.operand) + 8 * tile.chunk

    def products_bytes(self, tile: Tile) -> int:
        return round_up(4 * (3 * tile.chunk + 3 * tile.chunk // 16), 16) * (tile.warps if self.f else 1)

    def memory_bytes(self, tile: Tile) -> int:
        """The memory as operands, and the sum of the keys."""
        return tile_bytes(tile.value, self.key, self.operand) + (self.key * self.operand.itemsize if self.sums else 0)

    @remembered
    def forward_bytes(self, tile: Tile, memories: int) -> int:
        """sizeof(Shared) in linear.cu, which asserts it."""
        memory = self.memory_bytes(tile)
        features = 0 if self.row_map == AS_IS else 2 * tile_bytes(tile.chunk, self.key, self.operand)
        return 2 * self.stage_bytes(tile, 1) + memories * memory + features + self.products_bytes(tile)

    @remembered
    def backward_bytes(self, tile: Tile, stages: int) -> int:
        """sizeof(Shared) in linear_gradients.cuh, which asserts it."""
        memory = self.memory_bytes(tile)
        features = 0 if self.row_map == AS_IS else 4 * tile_bytes(tile.chunk, self.key, self.operand)
        pairs = tile_bytes(16, 16, torch.float32) * (tile.warps if self.f else 1)
        blocks, keys, values = tile.chunk // 16, groups(tile, self.key), groups(tile, tile.value)
        sums = (2 * keys + values + 1) * tile.chunk + 2 * keys * blocks + blocks**2 + tile.warps
        staged = stages * (self.stage_bytes(tile, 2) + memory + (4 * tile.chunk if self.sums else 0))
        return staged + memory + features + self.products_bytes(tile) + pairs + round_up(4 * sums, 16)

    def fitting(self, needed) -> int:
        """1, or 2 where two blocks with as much fit a multiprocessor."""
        return 2 if needed(2) <= (self.held - 1024) // 2 else 1

    def defines(self, tile: Tile, views: dict) -> dict[str, int | str]:
        return {
            "FW_IN": TYPES[self.dtype],
            "FW_K": self.key,
            "FW_V": tile.value,
            "FW_F": int(self.f),
            "FW_W": int(self.w),
            "FW_SUMS": int(self.sums),
            "FW_PRECISION": PRECISIONS[self.precision],
            "FW_WARPS": tile.warps,
            "FW_CHUNK": tile.chunk,
            "FW_ALIGNED": int(rows_aligned(views)),
            **map_defines(self.row_map, self.row),
        }

    def launch(self, launcher, name: str, tile: Tile, views: dict, pointers: dict, shared: int, divided, **more: int) -> None:
        q = views["q"]
        defines = self.defines(tile, views) | more | {"FW_SHARED": shared}
        source = "linear.cu" if name == "linear_forward" else "linear_backward.cu"
        divisor = (0.0, 0.0) if divided is None else divided[:2]
        params = pack_params(views, pointers, self.row_map.width(self.row), divisor)
        grid = (q.shape[0] * q.shape[1], self.tiles(tile))
        launcher(source, name, defines, grid, (32 * tile.warps,), params, shared, q.device)


def groups(tile: Tile, width: int) -> int:
    """As in linear.cuh."""
    n = 1
    while 2 * n * tile.chunk // 16 <= tile.warps and width % (32 * n) == 0:
        n *= 2
    return n


def supported(q: Tensor, k: Tensor, v: Tensor, f, z, e, w, row_map: RowMap = AS_IS, divided: bool = False) -> str | None:
    key = row_map.width(q.shape[-1])
    if key > LARGEST_KEY:
        return f"backend='cuda' has kernels without erase for keys up to {LARGEST_KEY} wide, not {key}"
    if launch.current().capability(q.device) < OLDEST:
        return f"backend='cuda' has kernels without erase for compute capability {OLDEST[0]}.{OLDEST[1]} and higher only"
    variant = Variant.of(q, v, f, w, "exact" if q.dtype == torch.float32 else "bf16", row_map, divided)
    needed = max(variant.forward_bytes(variant.ahead, 1), variant.backward_bytes(variant.back, 1))
    if needed > variant.held:
        return f"backend='cuda' needs {needed} bytes of shared memory for {q.dtype} keys {key} wide; this device has {variant.held}"
    return None


def borders_like(variant: Variant, q: Tensor) -> tuple[int, ...]:
    """The memory before each chunk of the backward, transposed, with rows of whole operands."""
    return (*q.shape[:2], -(-q.shape[2] // variant.back.chunk), round_up(variant.value, 16), variant.key)


def saved_like(q, k, v, f, z, e, w, memory, precision: str, row_map: RowMap = AS_IS, divided: bool = False):
    variant = Variant.of(q, v, f, w, precision, row_map, divided)
    borders = borders_like(variant, q)
    kept = [(borders, variant.operand)]
    return [*kept, ((*borders[:3], variant.key), variant.operand), (tuple(q.shape[:3]), torch.float32)] if divided else kept


def forward(
    launcher, q, k, v, f, z, e, w, memory, precision: str, keep: bool = True, row_map: RowMap = AS_IS,
    divided: Divided | None = None,
):  # fmt: skip
    """y, the final memory, and what ``backward`` needs; without ``keep`` that is nothing.

    divided: for reads that are divided; then the sums of keys are saved with the memories, and the divisors.
    """
    variant = Variant.of(q, v, f, w, precision, row_map, divided is not None)
    tile = variant.ahead
    y, final = torch.empty_like(v), torch.empty_like(memory)
    kept = saved_like(q, k, v, f, z, e, w, memory, precision, row_map, divided is not None) if keep else []
    saved = tuple(memory.new_empty(shape, dtype=dtype) for shape, dtype in kept)
    views = dict(q=q, k=k, v=v, f=f, w=w, y=y, divisors=saved[-1] if keep and divided else None)
    pointers = {"memory": memory, "final": final, "borders": saved[0] if keep else None}
    if divided:
        pointers |= {"sums": divided.sums, "final_sums": divided.final, "sums_borders": saved[1] if keep else None}
    memories = variant.fitting(lambda n: variant.forward_bytes(tile, n))
    shared, more = variant.forward_bytes(tile, memories), {"FW_MEMORIES": memories, "FW_PART": variant.back.chunk}
    variant.launch(launcher, "linear_forward", tile, views, pointers, shared, divided, **more)
    return y, final, saved


def backward(
    launcher, q, k, v, f, z, e, w, memory, saved, dy, dmemory, precision: str, row_map: RowMap = AS_IS,
    divided: Divided | None = None,
):  # fmt: skip
    """Gradients of q, k, v, f, z, e, w and memory; None for what is None."""
    variant = Variant.of(q, v, f, w, precision, row_map, divided is not None)
    tile, inputs = variant.back, {"q": q, "k": k, "f": f, "w": w}
    grads = {f"d{name}": torch.empty_like(x) for name, x in inputs.items() if x is not None}
    shares = {name: shares_of(grad, variant.tiles(tile)) for name, grad in grads.items()}
    dv, before = torch.empty_like(v), torch.empty_like(memory)
    views = inputs | shares | {"v": v, "dy": dy, "dv": dv}
    pointers = {"dfinal": dmemory, "dmemory": before, "borders": saved[0]}
    if divided:
        views["dy"], views["ddivisors"] = undivided(launcher, divided, saved[-1], dy)
        pointers |= {"dfinal_sums": divided.final, "dsums": divided.sums, "sums_borders": saved[1]}
    stages = variant.fitting(lambda n: variant.backward_bytes(tile, n))
    shared, more = variant.backward_bytes(tile, stages), {"FW_STAGES": stages, "FW_PARTIAL": int(variant.tiles(tile) > 1)}
    variant.launch(launcher, "linear_backward", tile, views, pointers, shared, divided, **more)
    for name, grad in grads.items():
        add_up(grad, shares[name])
    return grads["dq"], grads["dk"], dv, grads.get("df"), None, None, grads.get("dw"), before
