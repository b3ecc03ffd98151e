"""The kernel family with decay per channel (rule decay), without erase: what it supports, and the launches of ``cuda/decay.cu``,
``cuda/decay_walk.cu`` and ``cuda/decay_backward.cu``. ``decay_tiles`` has the layout of a launch.

fp16 inputs are multiplied in tf32, which holds them exactly. fp16 products would overflow where memories and gradients leave its
range, and bf16 would round the inputs once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...feature_maps import AS_IS, RowMap
from .compiler import Launcher
from .decay_tiles import (
    CHUNK,
    Tile,
    backward_shared,
    choose_backward,
    choose_forward,
    map_bytes,
    operand_bytes,
    padded,
    scale_bytes,
)
from .family import Family, Gradients, Operands, Results
from .launch import (
    IN_TF32,
    PRECISIONS,
    TYPES,
    add_up,
    held_bytes,
    in_units,
    map_defines,
    remembered,
    rows_aligned,
    shares_of,
    sizes_of,
    start,
    tile_bytes,
    tokens_of_part,
    why_not_held,
    why_not_wide,
)
from .linear import Block, LinearKernel
from .parameters import OF_ROWS, Kernel, Structure

LARGEST_K = 512
LARGEST_GRID = 65535  # along its second and third dimension
TENSOR = np.dtype([("data", "u8"), ("b", "i8"), ("h", "i8"), ("t", "i8"), ("share", "i8")])
TENSORS = ("q", "k", "v", "f", "z", "w", "y", "dy", "dq", "dk", "dv", "df", "dz", "dw")
SHARES = ("dq", "dk", "df", "dw")  # with a leading dimension, over which they sum to the result
MEMORIES = ("memory", "final_memory", "borders", "dfinal", "dmemory")
SIZES = ("T", "K", "V", "parts")
PARAMS = np.dtype([(n, TENSOR) for n in TENSORS] + [(n, "u8") for n in MEMORIES] + [(n, "i4") for n in SIZES], align=True)
STRUCTURE = Structure(PARAMS, SHARES)


class DecayKernel(NamedTuple):
    """What the layout of both kernels follows from, and the layout: the tiles, and the tokens of a part of the backward."""

    dtype: torch.dtype
    row: int  # width of q and k
    key: int  # of the features
    value: int
    precision: str
    f: bool
    z: bool
    row_map: RowMap
    held: int  # bytes of shared memory
    ahead: Any = None  # the Tile of the forward
    back: Any = None  # and of the backward
    part: int = 0

    @classmethod
    def of(cls, x: Operands) -> DecayKernel:
        given = IN_TF32[x.precision], x.f is not None, x.z is not None, x.row_map, held_bytes(x.q.device)
        return cls.of_sizes(x.q.dtype, x.q.shape[3], x.v.shape[3], *given)

    @classmethod
    @remembered
    def of_sizes(
        cls, dtype: torch.dtype, row: int, value: int, precision: str, f: bool, z: bool, row_map: RowMap, held: int
    ) -> DecayKernel:
        key = row_map.width(row)
        kernel = cls(dtype, row, key, value, precision, f, z, row_map, held)
        back, part = choose_backward(key, value, precision, f, z, kernel.map_bytes, held)
        return kernel._replace(ahead=choose_forward(key, value, precision), back=back, part=part)

    def map_bytes(self, chunks: int) -> int:
        return map_bytes(self.row, self.dtype, self.row_map, chunks)

    def saved_like(self, q: Tensor) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The memory before each part of the sequence but the first."""
        return [((*q.shape[:2], (q.shape[2] - 1) // self.part, self.key, self.value), torch.float32)]

    def row_chunks(self, backward: bool) -> int:
        """How many chunks have their rows in shared memory: two in turns in the forward, all chunks of a part in the backward."""
        return self.part // CHUNK if backward else 2

    def shared_bytes(self, backward: bool) -> int:
        """The bytes of ``Shared`` in decay.cu or decay_gradients.cuh."""
        if backward:
            return backward_shared(self.key, self.back, self.part, self.precision, self.f, self.z, self.map_bytes)
        K, V = padded(self.key), self.ahead.V
        operands = (2 * 16 * (K + 8) + 16 * (V + 8)) * operand_bytes(self.precision)
        y = 4 * (self.ahead.k_warps * 16 * (V + 8) if self.ahead.k_warps > 1 else 4)
        reads = 4 * (16 * (V + 8) if self.z else 4)
        return self.map_bytes(self.row_chunks(backward)) + operands + y + reads + scale_bytes(K, V)

    def launch(self, launcher: Launcher, backward: bool, tensors: dict[str, Any], sides: int = 0) -> None:
        """Starts the kernel of one pass. sides: as ``Walk.sides``."""

        def describe() -> Kernel:
            tile, v, T = self.back if backward else self.ahead, tensors["v"], tensors["q"].shape[2]
            name = "decay_backward" if backward else "decay_forward"
            shared = self.shared_bytes(backward)
            grid, block = (-(-v.shape[3] // tile.V), v.shape[1], v.shape[0] << sides), (32 * tile.warps(padded(self.key)),)
            sizes = {"T": T, "K": self.key, "V": self.value, "parts": -(-T // self.part)}
            source = "decay_backward.cu" if backward else "decay.cu"
            defines = self.defines(backward, tile, tensors, shared) | ({"FW_SIDE_BITS": sides} if sides else {})
            return Kernel(source, name, defines, grid, block, shared, sizes)

        start(launcher, STRUCTURE, (self, backward, sides), tensors, describe)

    def defines(self, backward: bool, tile: Tile, tensors: dict[str, Any], shared_bytes: int) -> dict[str, Any]:
        """The macros of one pass."""
        rows = () if self.row_map == AS_IS else ("q", "k", "dq", "dk")
        whole = {n: x[0] if n in SHARES else x for n, x in tensors.items() if n in TENSORS and x is not None}
        defines: dict[str, Any] = {
            "FW_IN": TYPES[self.dtype],
            "FW_K": padded(self.key),
            "FW_V": tile.V,
            "FW_F": int(self.f),
            "FW_Z": int(self.z),
            "FW_W": int(tensors["w"] is not None),
            "FW_PRECISION": PRECISIONS[self.precision],
            "FW_WARPS": tile.warps(padded(self.key)),
            "FW_K_WARPS": tile.k_warps,
            "FW_V_WARPS": tile.v_warps,
            "FW_PART": self.part,
            "FW_PAIRED": int(all(in_pairs(x) for n, x in whole.items() if n not in rows)),
            "FW_SHARED": shared_bytes,
            "FW_PARTIAL": int(backward and len(tensors["dq"]) > 1),
        }
        if self.row_map == AS_IS:
            return defines
        mapping = map_defines(self.row_map, self.row)
        mapping |= {"FW_ROW_CHUNKS": self.row_chunks(backward), "FW_ALIGNED": int(in_units(whole["q"]) and in_units(whole["k"]))}
        return defines | mapping


class Walk(NamedTuple):
    """How a pass over few sequences is shared among more blocks: 2 to the power of ``sides`` for a sequence and tile of V. Each
    begins with the memory before its tokens, or in the backward with its adjoint behind them, from ``cuda/decay_walk.cu``, whose
    block is that of ``linear``."""

    sides: int
    part: int  # tokens of a block
    linear: LinearKernel
    block: Block

    @classmethod
    def of(cls, kernel: DecayKernel, launcher: Launcher, v: Tensor, tile: Tile) -> Walk | None:
        """None where one block takes all of a sequence. v: or dy. tile: of the pass."""
        few = tokens_of_part(launcher, v, -(-kernel.value // tile.V), kernel.part)
        return cls.of_sizes(kernel, few, launcher.processors(v.device), *v.shape[:3]) if few < v.shape[2] else None

    @classmethod
    @remembered
    def of_sizes(cls, kernel: DecayKernel, few: int, processors: int, B: int, H: int, T: int) -> Walk | None:
        """few: how many tokens a block may take, at least."""
        sides = (-(-T // few)).bit_length() - 1
        if B << sides > LARGEST_GRID:
            return None
        given = kernel.dtype, kernel.row, kernel.value, False, False, kernel.precision, kernel.row_map, kernel.held, False
        linear = LinearKernel.of_sizes(*given).narrowed(B * H, processors)
        part = kernel.part * -(-T // (kernel.part << sides))
        for chunk in (64, 32, CHUNK):
            found = cls(sides, part, linear, linear.ahead._replace(chunk=chunk))
            if chunk <= kernel.part and found.bytes(kernel.f, kernel.z) <= kernel.held:
                return found
        return None

    def bytes(self, f: bool, z: bool) -> int:
        """sizeof(Shared) in decay_walk.cu, which asserts it."""
        key, (value, _, chunk) = self.linear.key, self.block
        gates = [tile_bytes((chunk, width, torch.float32)) if given else 16 for width, given in ((key, f), (value, z))]
        return self.linear.walk_bytes(self.block) + 2 * (sum(gates) + 4 * chunk) + 4 * (key + value) * (chunk // 16 + 1)

    def launch(self, launcher: Launcher, x: Operands, memory: Tensor | None, dy: Tensor | None = None) -> Tensor:
        """The memories from which blocks begin, (sides,B,H,K,V), or with dy their adjoints. The walk begins with ``memory``,
        and the last one is room for it."""
        (K, V), linear, block = x.widths, self.linear, self.block
        k, v, w = (x.k, x.v, x.w) if dy is None else (x.q, dy, None)
        found = v.new_empty((1 << self.sides, *v.shape[:2], K, V), dtype=torch.float32)
        tensors = {"k": k, "v": v, "f": x.f, "e": x.z, "w": w, "memory" if dy is None else "dfinal": memory, "adjoints": found}

        def describe() -> Kernel:
            defines = {
                "FW_IN": TYPES[linear.dtype],
                "FW_K": linear.key,
                "FW_V": block.value,
                "FW_W": int(w is not None),
                "FW_SUMS": 0,
                "FW_ADJOINT": int(dy is not None),
                "FW_KEYS": int(x.f is not None),
                "FW_VALUES": int(x.z is not None),
                "FW_PRECISION": PRECISIONS[linear.precision],
                "FW_WARPS": block.warps,
                "FW_CHUNK": block.chunk,
                "FW_ALIGNED": int(rows_aligned(tensors) and all(in_units(gate) for gate in (x.f, x.z) if gate is not None)),
                **map_defines(linear.row_map, linear.row),
                "FW_SHARED": self.bytes(x.f is not None, x.z is not None),
            }
            grid, sizes = (v.shape[0] * v.shape[1], linear.tiles(block)), sizes_of(k, K, V) | {"part": self.part}
            return Kernel("decay_walk.cu", "decay_walk", defines, grid, (32 * block.warps,), defines["FW_SHARED"], sizes)

        start(launcher, OF_ROWS, (self, dy is None), tensors, describe)
        return found


def supported(x: Operands) -> str | None:
    """``Family.supported``."""
    B, H = x.q.shape[:2]
    if B > LARGEST_GRID or H > LARGEST_GRID:
        return f"backend='cuda' has kernels without erase for up to {LARGEST_GRID} sequences and heads, not {B} and {H}"
    key, _ = x.widths
    return why_not_wide("without erase", x.q, key, LARGEST_K) or why_not_held(x.q, key, DecayKernel.of(x).shared_bytes(True))


def saved_like(x: Operands) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """``Family.saved_like``."""
    return DecayKernel.of(x).saved_like(x.q)


def forward(launcher: Launcher, x: Operands, keep: bool = True) -> Results:
    """``Family.forward``."""
    kernel = DecayKernel.of(x)
    sizes = (*x.q.shape[:2], kernel.key, kernel.value) if x.ends else 0
    y, final = torch.empty_like(x.v), x.q.new_empty(sizes, dtype=torch.float32)
    saved = tuple([x.q.new_empty(shape, dtype=dtype) for shape, dtype in kernel.saved_like(x.q)]) if keep else ()
    tensors = {"q": x.q, "k": x.k, "v": x.v, "f": x.f, "z": x.z, "w": x.w, "y": y}
    walk = Walk.of(kernel, launcher, x.v, kernel.ahead)
    begun = None if walk is None else walk.launch(launcher, x, x.memory)
    memories = {
        "memory": x.memory,
        "final_memory": final if x.ends else None,
        "borders": saved[0] if keep else None,
        "dmemory": begun,
    }
    kernel.launch(launcher, False, tensors | memories, 0 if walk is None else walk.sides)
    return y, final, saved


def backward(launcher: Launcher, x: Operands, saved: Sequence[Tensor], dy: Tensor, dmemory: Tensor | None) -> Gradients:
    """``Family.backward``. The gradient of the memory is also where the kernel keeps it between parts."""
    kernel = DecayKernel.of(x)
    inputs = {"q": x.q, "k": x.k, "v": x.v, "f": x.f, "z": x.z, "w": x.w}
    grads = {f"d{name}": torch.empty_like(part) for name, part in inputs.items() if part is not None}
    walk = Walk.of(kernel, launcher, dy, kernel.back)
    if walk is None:
        before = x.q.new_empty((1, *x.q.shape[:2], kernel.key, kernel.value), dtype=torch.float32)
    else:
        before = walk.launch(launcher, x, dmemory, dy)
    tiles = -(-kernel.value // kernel.back.V)
    of_tiles = {name: grad for name, grad in grads.items() if name in SHARES and name != "dw"}
    of_warps = {} if x.w is None else {"dw": grads["dw"]}
    shares, strengths = shares_of(of_tiles, tiles), shares_of(of_warps, tiles * kernel.back.v_warps)
    memories = {"memory": x.memory, "borders": saved[0], "dfinal": dmemory, "dmemory": before}
    sides = 0 if walk is None else walk.sides
    kernel.launch(launcher, True, inputs | grads | {"dy": dy} | shares | strengths | memories, sides)
    add_up(of_tiles, shares, tiles)
    add_up(of_warps, strengths, tiles * kernel.back.v_warps)
    dq, dk, dv, df, dz, dw = [grads.get(name) for name in ("dq", "dk", "dv", "df", "dz", "dw")]
    return dq, dk, dv, df, dz, None, dw, None if x.memory is None else before[0]


def in_pairs(x: Tensor) -> bool:
    """Whether two neighbouring channels can be moved at once, in every row, and the way from row to row has 32 bits."""
    if x.dim() == 3:
        return True
    size = x.element_size()
    paired = x.shape[-1] % 2 == 0 and x.data_ptr() % (2 * size) == 0 and all(s % 2 == 0 for s in x.stride()[:-1])
    return paired and size * x.stride(2) < 2**31


FAMILY = Family(("f per channel", "z per channel", "w per token"), (), supported, saved_like, forward, backward)
