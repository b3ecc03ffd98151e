"""The kernel family with erase (rules delta, gated_delta): what it supports, how ``cuda/delta.cu``,
``cuda/delta_adjoint.cu`` and ``cuda/delta_backward.cu`` are cut into tiles, and their launches.

Products of fp16 inputs are of fp16, with scales where memories, pairs and gradients leave its range (``cuda/erase.cuh``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...feature_maps import AS_IS, RowMap
from .compiler import Launcher
from .family import Family, Gradients, Operands, Results
from .launch import (
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
    why_not_held,
    why_not_wide,
)
from .parameters import OF_ROWS, Kernel

CHUNK = 16
LARGEST_KEY = 512
FIRSTS = 112  # bytes of the addresses that the backward keeps in shared memory
LONGEST_SPAN = 64
FP32 = torch.float32
SAVED = "borders", "scales"  # memories, and exponents of theirs in fp16


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


class ErasingKernel(NamedTuple):
    """The macros of the kernels of a family with erase, and the sizes that follow from them."""

    dtype: torch.dtype
    key: int  # FW_K
    tiling: Tiling
    tiles: int  # of V
    precision: str
    f: bool  # whether there is one gate per token
    rows: bool  # whether e is the rows that an erase reads with
    w: bool
    row: int  # width of q and k
    width: int  # of the features
    row_map: RowMap
    held: int  # bytes of shared memory
    ahead: bool = False  # whether more warps find what does not depend on the memory, a span ahead

    @property
    def operand(self) -> torch.dtype:
        return OPERANDS[self.precision]

    @property
    def warps(self) -> int:
        return self.tiling.value // 16 * self.tiling.ksplit

    def sums_bytes(self, accumulators: int) -> int:
        return 16 if self.tiling.ksplit == 1 else 2 * self.warps * accumulators * 32 * 16

    def saved_like(self, q: Tensor) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The memory before each part of the sequence, and its exponents in fp16."""
        B, H, T = q.shape[:3]
        parts = (T + self.tiling.part - 1) // self.tiling.part
        columns = self.tiles * self.tiling.value
        memories, exponents = (B * H * parts, columns, self.key), (B * H * parts, columns // 16)
        kept: list[tuple[tuple[int, ...], torch.dtype]] = [(memories, self.operand)]
        return [*kept, (exponents, torch.int32)] if self.precision == "fp16" else kept

    def exponents_bytes(self, chunks: int) -> int:
        """sizeof(Exponents) in erase.cuh, for each chunk."""
        return chunks * round_up(8 + self.tiling.value // 2, 16) if self.precision == "fp16" else 0

    def run_forward(self, launcher: Launcher, x: Operands, keep: bool) -> Results:
        """``Family.forward``."""
        sizes = (*x.q.shape[:2], self.width, x.v.shape[3]) if x.ends else 0
        y, final = torch.empty_like(x.v), x.q.new_empty(sizes, dtype=torch.float32)
        saved = tuple([x.q.new_empty(shape, dtype=dtype) for shape, dtype in self.saved_like(x.q)]) if keep else ()
        tensors = dict(q=x.q, k=x.k, v=x.v, f=x.f, e=x.e, w=x.w, y=y, memory=x.memory, final=final if x.ends else None)
        self.launch(launcher, "forward", tensors | dict(zip(SAVED, saved)))
        return y, final, saved

    def run_backward(
        self, launcher: Launcher, x: Operands, saved: Sequence[Tensor], dy: Tensor, dmemory: Tensor | None
    ) -> Gradients:
        """``Family.backward``."""
        inputs = {"q": x.q, "k": x.k, "f": x.f, "e": x.e, "w": x.w}
        grads = {f"d{name}": torch.empty_like(part) for name, part in inputs.items() if part is not None}
        shares = shares_of(grads, self.tiles)
        dv, before = torch.empty_like(x.v), None if x.memory is None else torch.empty_like(x.memory)
        rows, part = {"v": x.v, "dy": dy, "dv": dv}, self.tokens_of_part(launcher, dy)
        ends = {"memory": x.memory, "dfinal": dmemory, "dmemory": before}
        if part < dy.shape[2]:
            ends["adjoints"] = self.adjoints(launcher, inputs | {"dy": dy, "dfinal": dmemory}, part)
        self.launch(launcher, "backward", inputs | shares | rows | ends | dict(zip(SAVED, saved)), part)
        add_up(grads, shares, self.tiles)
        return grads["dq"], grads["dk"], dv, grads.get("df"), None, grads["de"], grads.get("dw"), before

    def tokens_of_part(self, launcher: Launcher, dy: Tensor) -> int:
        """How many tokens a block of the backward takes."""
        part = tokens_of_part(launcher, dy, self.tiles, max(self.tiling.span, self.tiling.part))
        return part if part == dy.shape[2] or self.adjoint_bytes() <= self.held else dy.shape[2]

    def forward_bytes(self) -> int:
        """sizeof(ForwardShared), which the kernel asserts."""
        raise NotImplementedError

    def adjoint_bytes(self) -> int:
        """sizeof(BackwardShared) in the kernel that finds adjoints, which asserts it: with dy in place of v."""
        rows = (2 + self.ahead) * self.tiling.span, self.tiling.value
        values = tile_bytes((*rows, self.operand)) - tile_bytes((*rows, self.dtype))
        return self.forward_bytes() + values + self.sums_bytes(2) - self.sums_bytes(4)

    def adjoints(self, launcher: Launcher, tensors: dict[str, Any], part: int) -> Tensor:
        """The adjoints of the memory before each part of the tokens but the first."""
        dy = tensors["dy"]
        found = dy.new_empty((-(-dy.shape[2] // part) - 1, *dy.shape[:2], self.width, dy.shape[3]), dtype=torch.float32)
        self.launch(launcher, "adjoint", tensors | {"w": None, "adjoints": found}, part)
        return found

    def launch(self, launcher: Launcher, name: str, tensors: dict[str, Any], part: int = 0) -> None:
        """Starts the kernel of one pass: "forward", "adjoint" or "backward", of which a block takes ``part`` tokens."""

        def describe() -> Kernel:
            family, shared, more = self.pass_macros(name, tensors)
            q, values = tensors["q"], tensors["dy" if name == "adjoint" else "v"]
            parts = -(-q.shape[2] // part) if part and name == "backward" else 1
            defines = {
                "FW_IN": TYPES[self.dtype],
                "FW_K": self.key,
                "FW_V": self.tiling.value,
                "FW_F": int(self.f),
                "FW_W": int(tensors["w"] is not None),
                "FW_PRECISION": PRECISIONS[self.precision],
                "FW_KSPLIT": self.tiling.ksplit,
                "FW_SPAN": self.tiling.part if name == "backward" else self.tiling.span,
                "FW_PART": self.tiling.part,
                "FW_SIDES": int(parts > 1),
                "FW_AHEAD": int(self.ahead and name != "backward"),
                "FW_PARTIAL": int(self.tiles > 1),
                "FW_SHARED": shared,
                **more,
            }
            kernel = f"{family}_{name}"
            source = f"{family}.cu" if name == "forward" else f"{kernel}.cu"
            grid = (q.shape[0] * q.shape[1], self.tiles, *[parts] * (parts > 1))
            sizes = sizes_of(q, self.width, values.shape[3]) | {"part": part}
            warps = self.warps + (self.tiling.span // CHUNK if defines["FW_AHEAD"] else 0)
            return Kernel(source, kernel, defines, grid, (32 * warps,), shared, sizes)

        start(launcher, OF_ROWS, (type(self), self, name, part), tensors, describe)

    def pass_macros(self, name: str, tensors: dict[str, Any]) -> tuple[str, int, dict[str, int]]:
        """The name of the sources, the bytes of shared memory, and the macros of one family only."""
        raise NotImplementedError


class DeltaKernel(ErasingKernel):
    """With at most one gate per token."""

    @classmethod
    def of(cls, x: Operands) -> DeltaKernel:
        given = x.f is not None, x.w is not None, x.precision, x.row_map, held_bytes(x.q.device)
        return cls.of_sizes(x.q.dtype, x.q.shape[3], x.v.shape[3], *given)

    @classmethod
    @remembered
    def of_sizes(
        cls, dtype: torch.dtype, row: int, value: int, f: bool, w: bool, precision: str, row_map: RowMap, held: int
    ) -> DeltaKernel:
        width = row_map.width(row)
        size = OPERANDS[precision].itemsize
        tiling = next(tiling for (widest, operand), tiling in TABLE.items() if widest >= width and operand == size)
        tiles = -(-value // tiling.value)
        value, key = round_up(-(-value // tiles), 16), round_up(width, 16 * tiling.ksplit)
        kernel = cls(dtype, key, tiling._replace(value=value), tiles, precision, f, False, w, row, width, row_map, held)
        if kernel.backward_bytes(1) > held:  # by its rows
            kernel = kernel._replace(tiling=kernel.tiling._replace(part=CHUNK))
        return kernel

    @remembered
    def of_pass(self, forward: bool, sequences: int, processors: int) -> DeltaKernel:
        """The same for the forward, or the backward and its walk, of so many sequences and heads: where half of the device would be
        idle with warps that are ahead, and where the device is full all the same with tiles twice as wide."""
        kernel, tiling, blocks, short = self, self.tiling, sequences * self.tiles, self.operand.itemsize == 2
        if tiling.ksplit > 1:
            return self
        if 2 * blocks <= processors:
            kernel = self._replace(ahead=self.row_map == AS_IS)
        elif short and self.tiles % 2 == 0 and blocks > processors and (forward or self.key > 64):
            kernel = self._replace(tiles=self.tiles // 2, tiling=tiling._replace(value=2 * tiling.value))
        for span in (LONGEST_SPAN if short else tiling.span, tiling.span):
            for choice in (kernel, self):
                found = choice._replace(tiling=choice.tiling._replace(span=span))
                if found.fits(forward):
                    return found
        return self

    def fits(self, forward: bool) -> bool:
        """Whether a block has the shared memory for its passes."""
        return (self.forward_bytes() if forward else max(self.backward_bytes(1), self.adjoint_bytes())) <= self.held

    def raw(self, rows: int) -> tuple[int, int, torch.dtype]:
        """The tile of so many rows of q and k before the feature map."""
        unit = 16 // self.dtype.itemsize
        return 2 * rows, -(-self.row // unit) * unit, self.dtype

    @remembered
    def forward_bytes(self) -> int:
        """sizeof(ForwardShared), which the kernel asserts."""
        span, value, key, operand = self.tiling.span, self.tiling.value, self.key, self.operand
        rows, stages = (2 * span, key, operand), 2 + self.ahead
        stage = tile_bytes(rows if self.row_map == AS_IS else self.raw(span), (span, value, self.dtype)) + 24 * span
        prepared = tile_bytes((span, CHUNK, FP32), (span, CHUNK, operand)) + self.exponents_bytes(span // CHUNK)
        features = 0 if self.row_map == AS_IS else tile_bytes(rows)
        return stages * stage + features + (1 + self.ahead) * prepared + self.sums_bytes(4)

    @remembered
    def backward_bytes(self, stages: int) -> int:
        """sizeof(BackwardShared), which the kernel asserts."""
        span, value, operand, mapped = self.tiling.part, self.tiling.value, self.operand, self.row_map != AS_IS
        chunks = span // CHUNK
        group, keys = chunks if stages > 1 else 1, (2 * span, self.key, operand)
        stage = self.raw(span) if mapped else keys, (span, value, operand), (span, value, self.dtype)
        border = value * self.key * operand.itemsize if stages > 1 else 16
        memories = ((chunks + group) * value, self.key, operand), ((chunks + group) * value, CHUNK, operand)
        pairs = ((chunks + group) * CHUNK, CHUNK, operand)
        solved = (2 * span + (span if self.f else CHUNK), CHUNK, FP32)
        ahead = stages > 1 and not mapped and self.warps > (chunks + 1) // 2
        spans = [(2 * span, CHUNK, FP32)] if ahead and self.f else []
        sums = 4 * chunks * (self.warps * 3 * CHUNK + CHUNK + value + self.warps)
        added = FIRSTS + border + (0 if spans else 32) + self.sums_bytes(2) + self.exponents_bytes(chunks)
        if mapped and self.precision == "fp16":
            added += tile_bytes((2 * span, self.key, FP32))
        kept = tile_bytes(*memories, pairs, solved, *[keys] * mapped, *spans) + round_up(sums, 16)
        return stages * (tile_bytes(*stage) + 24 * span) + kept + added

    def stages(self) -> int:
        """2 where the backward has room for two parts, but not at the price of a second block on a multiprocessor."""
        limits = ((self.held - 1024) // 2, self.held)
        return next((n for most in limits for n in (2, 1) if self.backward_bytes(n) <= most), 1)

    def pass_macros(self, name: str, tensors: dict[str, Any]) -> tuple[str, int, dict[str, int]]:
        more = {"FW_ALIGNED": int(rows_aligned(tensors)), **map_defines(self.row_map, self.row)}
        if name != "backward":
            return "delta", self.forward_bytes() if name == "forward" else self.adjoint_bytes(), more
        stages = self.stages()
        return "delta", self.backward_bytes(stages), {"FW_STAGES": stages, **more}


def supported(x: Operands) -> str | None:
    """``Family.supported``."""
    key, _ = x.widths
    if reason := why_not_wide("with erase", x.q, key, LARGEST_KEY):
        return reason
    kernel = DeltaKernel.of(x)
    return why_not_held(x.q, key, max(kernel.forward_bytes(), kernel.backward_bytes(1)))


def of_pass(launcher: Launcher, x: Operands, forward: bool) -> DeltaKernel:
    """The kernel of one pass."""
    return DeltaKernel.of(x).of_pass(forward, x.v.shape[0] * x.v.shape[1], launcher.processors(x.v.device))


def saved_like(x: Operands) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """``Family.saved_like``."""
    return DeltaKernel.of(x).saved_like(x.q)


def forward(launcher: Launcher, x: Operands, keep: bool = True) -> Results:
    """``Family.forward``."""
    return of_pass(launcher, x, True).run_forward(launcher, x, keep)


def backward(launcher: Launcher, x: Operands, saved: Sequence[Tensor], dy: Tensor, dmemory: Tensor | None) -> Gradients:
    """``Family.backward``."""
    return of_pass(launcher, x, False).run_backward(launcher, x, saved, dy, dmemory)


FAMILY = Family(("f per token", "e per token", "w per token"), ("e per token",), supported, saved_like, forward, backward)
