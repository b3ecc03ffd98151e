"""The kernel family without erase and with at most one gate per token (rules sum, gated): what it supports, and the launches of
``cuda/linear.cu`` and ``cuda/linear_backward.cu``.

fp16 inputs are multiplied in tf32, which holds them exactly. fp16 products would overflow where memories and gradients leave its
range, and bf16 would round the inputs once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...feature_maps import AS_IS, RowMap
from .family import Divided, Family, Gradients, Launcher, Operands, Results
from .launch import (
    PRECISIONS,
    TYPES,
    add_up,
    held_bytes,
    map_defines,
    pack_params,
    remembered,
    round_up,
    rows_aligned,
    shares_of,
    tile_bytes,
    undivided,
    why_not_held,
    why_not_wide,
)

LARGEST_KEY, LARGEST_VALUE = 512, 128
FEWEST_WARPS = 4  # of a block, if the key can be split among them
ROWS_OF_A_WARP = 128  # of the memory: 64 fp32 registers a thread, and as many for its operands


class Block(NamedTuple):
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


def tiles_for(key: int, value: int, longest: int) -> Iterator[Block]:
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
            yield Block(width, slices, chunk)
            chunk //= 2
        width //= 2


class LinearKernel(NamedTuple):
    """The macros of both kernels, and the sizes that follow from them."""

    dtype: torch.dtype
    key: int  # FW_K
    value: int  # width of v
    precision: str
    f: bool
    w: bool
    row: int  # width of q and k
    width: int  # of the features
    row_map: RowMap
    held: int  # bytes of shared memory
    sums: bool = False  # reads are divided
    ahead: Any = None  # the Block of the forward
    back: Any = None  # and of the backward

    @classmethod
    def of(cls, x: Operands) -> LinearKernel:
        gates, held = (x.f is not None, x.w is not None), held_bytes(x.q.device)
        given = x.q.dtype, x.q.shape[3], *x.memory.shape[2:], *gates, x.precision, x.row_map, held
        return cls.of_sizes(*given, x.divided is not None)

    @classmethod
    @remembered
    def of_sizes(
        cls,
        dtype: torch.dtype,
        row: int,
        width: int,
        value: int,
        f: bool,
        w: bool,
        precision: str,
        row_map: RowMap,
        held: int,
        sums: bool,
    ) -> LinearKernel:
        key = round_up(width, 16 * fewest_slices(width))
        kernel = cls(dtype, key, value, precision, f, w, row, width, row_map, held, sums)
        longest = 64 if precision == "bf16" else 32
        back = kernel.choose(longest, lambda tile: kernel.backward_bytes(tile, 1))
        ahead = kernel.choose(back.chunk, lambda tile: kernel.forward_bytes(tile, 1))
        return kernel._replace(ahead=ahead, back=back)

    def choose(self, longest: int, needed: Callable[[Block], int]) -> Block:
        """The first tile that the device's shared memory holds, the smallest where it holds none."""
        for tile in tiles_for(self.key, self.value, longest):
            if needed(tile) <= self.held:
                break
        return tile

    @property
    def operand(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def tiles(self, tile: Block) -> int:
        return -(-self.value // tile.value)

    def stage_bytes(self, tile: Block, values: int) -> int:
        """The rows of q and k of a chunk, ``values`` times those of v, and gates."""
        row, dtype = (self.key, self.operand) if self.row_map == AS_IS else (self.row, self.dtype)
        rows = (2 * tile.chunk, round_up(row, 16 // dtype.itemsize), dtype)
        return tile_bytes(rows, (values * tile.chunk, tile.value, self.operand)) + 8 * tile.chunk

    def products_bytes(self, tile: Block) -> int:
        return round_up(4 * (3 * tile.chunk + 3 * tile.chunk // 16), 16) * (tile.warps if self.f else 1)

    def memory_bytes(self, tile: Block) -> int:
        """The memory as operands, and the sum of the keys."""
        return tile_bytes((tile.value, self.key, self.operand)) + (self.key * self.operand.itemsize if self.sums else 0)

    def feature_bytes(self, tile: Block, rows: int) -> int:
        """So many features of each token, where the kernels make them."""
        return 0 if self.row_map == AS_IS else tile_bytes((rows * tile.chunk, self.key, self.operand))

    @remembered
    def forward_bytes(self, tile: Block, memories: int) -> int:
        """sizeof(Shared) in linear.cu, which asserts it."""
        kept = memories * self.memory_bytes(tile) + self.feature_bytes(tile, 2) + self.products_bytes(tile)
        return 2 * self.stage_bytes(tile, 1) + kept

    @remembered
    def backward_bytes(self, tile: Block, stages: int) -> int:
        """sizeof(Shared) in linear_gradients.cuh, which asserts it."""
        memory, pairs = self.memory_bytes(tile), tile_bytes((16, 16, torch.float32)) * (tile.warps if self.f else 1)
        blocks, keys, values = tile.chunk // 16, groups(tile, self.key), groups(tile, tile.value)
        sums = (2 * keys + values + 1) * tile.chunk + 2 * keys * blocks + blocks**2 + tile.warps
        staged = stages * (self.stage_bytes(tile, 2) + memory + (4 * tile.chunk if self.sums else 0))
        return staged + memory + self.feature_bytes(tile, 4) + self.products_bytes(tile) + pairs + round_up(4 * sums, 16)

    def fitting(self, needed: Callable[[int], int]) -> int:
        """1, or 2 where two blocks with as much fit a multiprocessor."""
        return 2 if needed(2) <= (self.held - 1024) // 2 else 1

    def launch(
        self,
        launcher: Launcher,
        name: str,
        tile: Block,
        views: dict[str, Any],
        pointers: dict[str, Any],
        shared: int,
        divided: Divided | None,
        **more: int,
    ) -> None:
        """Starts the kernel ``name``."""
        q = views["q"]
        defines = {
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
            **more,
            "FW_SHARED": shared,
        }
        source = "linear.cu" if name == "linear_forward" else "linear_backward.cu"
        divisor = (0.0, 0.0) if divided is None else divided[:2]
        params = pack_params(views, pointers, self.width, divisor)
        grid = (q.shape[0] * q.shape[1], self.tiles(tile))
        launcher(source, name, defines, grid, (32 * tile.warps,), params, shared, q.device)


def groups(tile: Block, width: int) -> int:
    """As in linear.cuh."""
    n = 1
    while 2 * n * tile.chunk // 16 <= tile.warps and width % (32 * n) == 0:
        n *= 2
    return n


def supported(x: Operands) -> str | None:
    """``Family.supported``."""
    key = x.memory.shape[2]
    if reason := why_not_wide("without erase", x.q, key, LARGEST_KEY):
        return reason
    kernel = LinearKernel.of(x)
    return why_not_held(x.q, key, max(kernel.forward_bytes(kernel.ahead, 1), kernel.backward_bytes(kernel.back, 1)))


def saved_like(x: Operands) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The memory before each chunk of the backward, transposed, with rows of whole operands; where reads are divided also the sums
    of keys there, and the divisors."""
    kernel = LinearKernel.of(x)
    chunks = (*x.q.shape[:2], -(-x.q.shape[2] // kernel.back.chunk))
    kept = [((*chunks, round_up(kernel.value, 16), kernel.key), kernel.operand)]
    return kept if x.divided is None else [*kept, ((*chunks, kernel.key), kernel.operand), (tuple(x.q.shape[:3]), torch.float32)]


def forward(launcher: Launcher, x: Operands, keep: bool = True) -> Results:
    """``Family.forward``."""
    kernel = LinearKernel.of(x)
    tile, divided = kernel.ahead, x.divided
    y, final = torch.empty_like(x.v), torch.empty_like(x.memory)
    saved = tuple(x.memory.new_empty(shape, dtype=dtype) for shape, dtype in (saved_like(x) if keep else []))
    views = dict(q=x.q, k=x.k, v=x.v, f=x.f, w=x.w, y=y, divisors=saved[-1] if keep and divided else None)
    pointers = {"memory": x.memory, "final": final, "borders": saved[0] if keep else None}
    if divided:
        pointers |= {"sums": divided.sums, "final_sums": divided.final, "sums_borders": saved[1] if keep else None}
    memories = kernel.fitting(lambda n: kernel.forward_bytes(tile, n))
    shared, more = kernel.forward_bytes(tile, memories), {"FW_MEMORIES": memories, "FW_PART": kernel.back.chunk}
    kernel.launch(launcher, "linear_forward", tile, views, pointers, shared, divided, **more)
    return y, final, saved


def backward(launcher: Launcher, x: Operands, saved: Sequence[Tensor], dy: Tensor, dmemory: Tensor) -> Gradients:
    """``Family.backward``."""
    kernel = LinearKernel.of(x)
    tile, inputs, divided = kernel.back, {"q": x.q, "k": x.k, "f": x.f, "w": x.w}, x.divided
    grads = {f"d{name}": torch.empty_like(part) for name, part in inputs.items() if part is not None}
    shares = {name: shares_of(grad, kernel.tiles(tile)) for name, grad in grads.items()}
    dv, before = torch.empty_like(x.v), torch.empty_like(x.memory)
    views = inputs | shares | {"v": x.v, "dy": dy, "dv": dv}
    pointers: dict[str, Any] = {"dfinal": dmemory, "dmemory": before, "borders": saved[0]}
    if divided:
        views["dy"], views["ddivisors"] = undivided(launcher, divided, saved[-1], dy)
        pointers |= {"dfinal_sums": divided.final, "dsums": divided.sums, "sums_borders": saved[1]}
    stages = kernel.fitting(lambda n: kernel.backward_bytes(tile, n))
    shared, more = kernel.backward_bytes(tile, stages), {"FW_STAGES": stages, "FW_PARTIAL": int(kernel.tiles(tile) > 1)}
    kernel.launch(launcher, "linear_backward", tile, views, pointers, shared, divided, **more)
    for name, grad in grads.items():
        add_up(grad, shares[name])
    return grads["dq"], grads["dk"], dv, grads.get("df"), None, None, grads.get("dw"), before


FAMILY = Family(("f per token", "w per token"), (), supported, saved_like, forward, backward, divides=True)
