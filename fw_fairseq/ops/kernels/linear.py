"""The kernel family without erase and with at most one gate per token (rules sum, gated): what it supports, and the launches of
``cuda/linear.cu``, ``cuda/linear_adjoint.cu`` and ``cuda/linear_backward.cu``.

Products of fp16 inputs are of fp16, with scales where memories, pairs and gradients leave its range (``cuda/range.cuh``). Where
reads are divided they are of tf32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...feature_maps import AS_IS, RowMap
from .compiler import Launcher
from .family import Divided, Family, Gradients, Operands, Results
from .launch import (
    IN_TF32,
    OPERANDS,
    PRECISIONS,
    TYPES,
    add_up,
    held_bytes,
    map_defines,
    remembered,
    round_up,
    rows_aligned,
    shares_of,
    sizes_of,
    start,
    tile_bytes,
    tokens_of_part,
    undivided,
    why_not_held,
    why_not_wide,
)
from .parameters import OF_ROWS, Kernel

SOURCES = {"linear_forward": "linear.cu", "linear_adjoint": "linear_adjoint.cu", "linear_backward": "linear_backward.cu"}
LARGEST_KEY, LARGEST_VALUE = 512, 128
NARROWEST = 32  # columns of a block that are halved to fill the device: narrower ones read q and k too often
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
        precision = x.precision if x.divided is None else IN_TF32[x.precision]
        given = x.q.dtype, x.q.shape[3], x.v.shape[3], *gates, precision, x.row_map, held
        return cls.of_sizes(*given, x.divided is not None)

    @classmethod
    @remembered
    def of_sizes(
        cls,
        dtype: torch.dtype,
        row: int,
        value: int,
        f: bool,
        w: bool,
        precision: str,
        row_map: RowMap,
        held: int,
        sums: bool,
    ) -> LinearKernel:
        width = row_map.width(row)
        key = round_up(width, 16 * fewest_slices(width))
        kernel = cls(dtype, key, value, precision, f, w, row, width, row_map, held, sums)
        longest = 64 if OPERANDS[precision] != torch.float32 else 32
        back = kernel.choose(longest, lambda tile: kernel.backward_bytes(tile, 1), value)
        return kernel._replace(ahead=kernel.choose_ahead(back, value), back=back)

    def choose_ahead(self, back: Block, value: int) -> Block:
        """The tile of the forward, for values this wide."""
        return self.choose(back.chunk, lambda tile: self.forward_bytes(tile, 1), value)

    def choose(self, longest: int, needed: Callable[[Block], int], value: int) -> Block:
        """The first tile that the device's shared memory holds, the smallest where it holds none."""
        for tile in tiles_for(self.key, value, longest):
            if needed(tile) <= self.held:
                break
        return tile

    def narrowed(self, sequences: int, processors: int) -> LinearKernel:
        """With narrower tiles of the forward where so few sequences and heads would leave half of the device idle. The backward
        would then have to add up more shares of dq and dk."""
        kernel = self
        while kernel.ahead.value > NARROWEST and 2 * sequences * kernel.tiles(kernel.ahead) <= processors:
            tile = self.choose_ahead(self.back, kernel.ahead.value // 2)
            if tile.warps < min(FEWEST_WARPS, kernel.ahead.warps):
                break
            kernel = kernel._replace(ahead=tile)
        return kernel

    @property
    def operand(self) -> torch.dtype:
        return OPERANDS[self.precision]

    @property
    def scales(self) -> bool:
        """Whether memories in shared memory and borders have scales."""
        return self.precision == "fp16"

    def tiles(self, tile: Block) -> int:
        return -(-self.value // tile.value)

    def row_tile(self, rows: int) -> tuple[int, int, torch.dtype]:
        """So many rows of q and k as they are in device memory."""
        row, dtype = (self.key, self.operand) if self.row_map == AS_IS else (self.row, self.dtype)
        return rows, round_up(row, 16 // dtype.itemsize), dtype

    def stage_bytes(self, tile: Block, values: int) -> int:
        """The rows of q and k of a chunk, ``values`` times those of v, and gates."""
        return tile_bytes(self.row_tile(2 * tile.chunk), (values * tile.chunk, tile.value, self.operand)) + 8 * tile.chunk

    def products_bytes(self, tile: Block) -> int:
        return round_up(4 * (3 * tile.chunk + 3 * tile.chunk // 16), 16) * (tile.warps if self.f else 1)

    def memory_bytes(self, tile: Block) -> int:
        """The memory as operands, and the sum of the keys."""
        return tile_bytes((tile.value, self.key, self.operand)) + (self.key * self.operand.itemsize if self.sums else 0)

    def feature_bytes(self, tile: Block, gradients: int) -> int:
        """The features of q and k, where the kernels make them, and so many gradients of each."""
        if self.row_map == AS_IS:
            return 0
        of_gradients = (2 * gradients * tile.chunk, self.key, torch.float32 if self.scales else self.operand)
        return tile_bytes((2 * tile.chunk, self.key, self.operand), of_gradients)

    @remembered
    def forward_bytes(self, tile: Block, memories: int) -> int:
        """sizeof(Shared) in linear.cu, which asserts it."""
        kept = memories * self.memory_bytes(tile) + self.feature_bytes(tile, 0) + self.products_bytes(tile)
        return 2 * self.stage_bytes(tile, 1) + kept + 64 * self.scales

    def walk_bytes(self, tile: Block) -> int:
        """The rows of q and dy of two chunks, and the features of q, of a kernel that finds adjoints."""
        rows = tile_bytes(self.row_tile(tile.chunk), (tile.chunk, tile.value, self.operand))
        return 2 * rows + (0 if self.row_map == AS_IS else tile_bytes((tile.chunk, self.key, self.operand)))

    @remembered
    def adjoint_bytes(self, tile: Block) -> int:
        """sizeof(Shared) in linear_adjoint.cu, which asserts it."""
        return self.walk_bytes(tile) + 8 * tile.chunk * (1 + self.sums) + self.products_bytes(tile)

    @remembered
    def backward_bytes(self, tile: Block, stages: int) -> int:
        """sizeof(Shared) in linear_gradients.cuh, which asserts it."""
        memory, pairs = self.memory_bytes(tile), tile_bytes((16, 16, torch.float32)) * (tile.warps if self.f else 1)
        blocks, keys, values = tile.chunk // 16, groups(tile, self.key), groups(tile, tile.value)
        sums = (2 * keys + values + 1) * tile.chunk + 2 * keys * blocks + blocks**2 + tile.warps
        staged = stages * (self.stage_bytes(tile, 2) + memory + (4 * tile.chunk if self.sums else 0) + 16 * self.scales)
        kept = self.feature_bytes(tile, 1) + self.products_bytes(tile) + pairs + 64 * self.scales
        return staged + memory + kept + round_up(4 * sums, 16)

    def fitting(self, needed: Callable[[int], int]) -> int:
        """1, or 2 where two blocks with as much fit a multiprocessor."""
        return 2 if needed(2) <= (self.held - 1024) // 2 else 1

    def saved_like(self, q: Tensor) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """``Family.saved_like``: the memory before each chunk of the backward, transposed, with rows of whole operands, and its
        scales in fp16; where reads are divided also the sums of keys there, and the divisors."""
        chunks = (*q.shape[:2], -(-q.shape[2] // self.back.chunk))
        operand = self.operand
        kept = [((*chunks, -(-self.value // 16) * 16, self.key), operand)]
        if self.precision == "fp16":
            return [*kept, ((*chunks, -(-self.value // 16)), torch.int32)]
        return [*kept, ((*chunks, self.key), operand), (tuple(q.shape[:3]), torch.float32)] if self.sums else kept

    def launch(self, launcher: Launcher, name: str, tensors: dict[str, Any], divided: Divided | None, part: int = 0) -> None:
        """Starts the kernel of one pass. part: tokens that a block of the backward takes."""
        divisor = (0.0, 0.0) if divided is None else (divided.eps, divided.least)

        def describe() -> Kernel:
            q = tensors["q"]
            sequences = q.shape[0] * q.shape[1]
            parts = -(-q.shape[2] // part) if part and name == "linear_backward" else 1
            tile, shared, more = self.narrowed(sequences, launcher.processors(q.device)).pass_macros(name, parts)
            defines = {
                "FW_IN": TYPES[self.dtype],
                "FW_K": self.key,
                "FW_V": tile.value,
                "FW_F": int(self.f),
                "FW_W": int(tensors["w"] is not None),
                "FW_SUMS": int(self.sums),
                "FW_PRECISION": PRECISIONS[self.precision],
                "FW_WARPS": tile.warps,
                "FW_CHUNK": tile.chunk,
                "FW_ALIGNED": int(rows_aligned(tensors)),
                **map_defines(self.row_map, self.row),
                **more,
                "FW_SHARED": shared,
            }
            grid = (sequences, self.tiles(tile), *[parts] * (parts > 1))
            sizes = sizes_of(q, self.width, self.value, divisor) | {"part": part}
            return Kernel(SOURCES[name], name, defines, grid, (32 * tile.warps,), shared, sizes)

        start(launcher, OF_ROWS, (self, name, divisor, part), tensors, describe)

    def adjoints(self, launcher: Launcher, tensors: dict[str, Any], divided: Divided | None, part: int) -> dict[str, Tensor]:
        """The adjoints of the memory, and of the sums, before each part of the tokens but the first."""
        dy = tensors["dy"]
        parts = (-(-dy.shape[2] // part) - 1, *dy.shape[:2])
        found = {"adjoints": dy.new_empty((*parts, self.width, self.value), dtype=torch.float32)}
        if divided:
            found["adjoint_sums"] = dy.new_empty((*parts, self.width), dtype=torch.float32)
        names = ("q", "dy", "f", "dfinal", *(("dfinal_sums", "ddivisors") if divided else ()))
        self.launch(launcher, "linear_adjoint", {name: tensors[name] for name in names} | {"w": None} | found, divided, part)
        return found

    def pass_macros(self, name: str, parts: int) -> tuple[Block, int, dict[str, int]]:
        """The tile of one pass, its bytes of shared memory, and the macros of this pass only."""
        tile = self.back if name == "linear_backward" else self.ahead
        if name == "linear_backward":
            stages = self.fitting(lambda n: self.backward_bytes(tile, n))
            more = {"FW_STAGES": stages, "FW_PARTIAL": int(self.tiles(tile) > 1), "FW_SIDES": int(parts > 1)}
            return tile, self.backward_bytes(tile, stages), more
        if name == "linear_adjoint":
            return tile, self.adjoint_bytes(tile), {}
        memories = self.fitting(lambda n: self.forward_bytes(tile, n))
        return tile, self.forward_bytes(tile, memories), {"FW_MEMORIES": memories, "FW_PART": self.back.chunk}


def groups(tile: Block, width: int) -> int:
    """As in linear.cuh."""
    n = 1
    while 2 * n * tile.chunk // 16 <= tile.warps and width % (32 * n) == 0:
        n *= 2
    return n


def supported(x: Operands) -> str | None:
    """``Family.supported``."""
    key, _ = x.widths
    if reason := why_not_wide("without erase", x.q, key, LARGEST_KEY):
        return reason
    kernel = LinearKernel.of(x)
    return why_not_held(x.q, key, max(kernel.forward_bytes(kernel.ahead, 1), kernel.backward_bytes(kernel.back, 1)))


def saved_like(x: Operands) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """``Family.saved_like``."""
    return LinearKernel.of(x).saved_like(x.q)


def forward(launcher: Launcher, x: Operands, keep: bool = True) -> Results:
    """``Family.forward``."""
    kernel = LinearKernel.of(x)
    divided = x.divided
    sizes = (*x.q.shape[:2], kernel.width, kernel.value) if x.ends else 0
    y, final = torch.empty_like(x.v), x.q.new_empty(sizes, dtype=torch.float32)
    saved = tuple([x.q.new_empty(shape, dtype=dtype) for shape, dtype in kernel.saved_like(x.q)]) if keep else ()
    tensors = dict(q=x.q, k=x.k, v=x.v, f=x.f, w=x.w, y=y, memory=x.memory, final=final if x.ends else None)
    tensors |= {"borders": saved[0] if keep else None, "scales": saved[1] if keep and kernel.precision == "fp16" else None}
    if divided:
        tensors |= {"sums": divided.sums, "final_sums": divided.final}
        if keep:
            tensors |= {"sums_borders": saved[1], "divisors": saved[2]}
    kernel.launch(launcher, "linear_forward", tensors, divided)
    return y, final, saved


def backward(launcher: Launcher, x: Operands, saved: Sequence[Tensor], dy: Tensor, dmemory: Tensor | None) -> Gradients:
    """``Family.backward``."""
    kernel = LinearKernel.of(x)
    inputs, divided = {"q": x.q, "k": x.k, "f": x.f, "w": x.w}, x.divided
    grads = {f"d{name}": torch.empty_like(part) for name, part in inputs.items() if part is not None}
    tiles = kernel.tiles(kernel.back)
    shares = shares_of(grads, tiles)
    dv, before = torch.empty_like(x.v), None if x.memory is None else torch.empty_like(x.memory)
    tensors = inputs | shares | {"v": x.v, "dy": dy, "dv": dv, "dfinal": dmemory, "dmemory": before, "borders": saved[0]}
    tensors |= {"memory": x.memory, "scales": saved[1] if kernel.precision == "fp16" else None}
    if divided:
        tensors["dy"], tensors["ddivisors"] = undivided(launcher, divided, saved[-1], dy)
        tensors |= {"dfinal_sums": divided.final, "dsums": divided.sums, "sums_borders": saved[1]}
    part = tokens_of_part(launcher, dy, tiles, kernel.back.chunk)
    if part < dy.shape[2]:
        tensors |= kernel.adjoints(launcher, tensors, divided, part)
    kernel.launch(launcher, "linear_backward", tensors, divided, part)
    add_up(grads, shares, tiles)
    return grads["dq"], grads["dk"], dv, grads.get("df"), None, None, grads.get("dw"), before


FAMILY = Family(("f per token", "w per token"), (), supported, saved_like, forward, backward, divides=True)
