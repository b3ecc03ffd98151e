"""The layout of the kernels without erase: the tile of a block, the parts of the sequence that the backward takes one by one, and
the shared memory of both. ``decay`` launches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ...feature_maps import AS_IS, RowMap
from .launch import SHARED

CHUNK = 16


class Tile(NamedTuple):
    """How a block is laid out: V channels of its tile, and warps that share 16 of them along K."""

    V: int
    k_warps: int

    @property
    def v_warps(self) -> int:
        return self.V // 16

    def warps(self, K: int) -> int:
        """Enough for the memory, and one for 64 columns of half a chunk, or for 32 of all of it."""
        return max(self.k_warps * self.v_warps, -(-K // 32) + -(-self.V // 32))


# By K, padded: the widest tile. A memory is 32 to 64 fp32 registers a thread, its adjoint 16 to 32: no spills to K = 64.
FORWARD = {
    16: Tile(64, 1),
    32: Tile(64, 1),
    64: Tile(128, 1),
    128: Tile(128, 1),
    256: Tile(64, 2),
    384: Tile(32, 6),
    512: Tile(32, 8),
}
BACKWARD = {
    16: Tile(64, 1),
    32: Tile(64, 1),
    64: Tile(64, 1),
    128: Tile(32, 4),
    256: Tile(32, 4),
    384: Tile(16, 12),
    512: Tile(16, 16),
}


def padded(width: int) -> int:
    """The least width of the tables that has room; of symbolic widths too."""
    for room in FORWARD:
        if width <= room:
            break
    return room


def choose_tile(table: dict[int, Tile], K: int, V: int) -> Tile:
    """The table's tile, no wider than V needs."""
    tile = table[padded(K)]
    return tile._replace(V=min(tile.V, padded(V)))


def choose_forward(K: int, V: int, precision: str) -> Tile:
    """The tile of the forward."""
    tile = choose_tile(FORWARD, K, V)
    if precision == "bf16" or padded(K) not in (64, 128):
        return tile
    # Operands of 32 bits take more registers: less of the memory to a warp.
    return Tile(min(tile.V, 64), 2)


def choose_backward(
    K: int, V: int, precision: str, has_f: bool, has_z: bool, map_bytes: Callable[[int], int], held: int
) -> tuple[Tile, int]:
    """The widest tile and the longest part that ``held`` bytes of shared memory hold; the smallest of both where they hold none."""
    tile = choose_tile(BACKWARD, K, V)
    if precision != "bf16" and padded(K) == 64:
        tile = tile._replace(k_warps=2)
    if precision == "bf16" and padded(K) == 128 and held > SHARED:  # fewer tiles: each of them scales all of q and k
        width = min(64, padded(V))
        tile = Tile(width, 128 // width)
    else:
        held = SHARED
    while True:
        for part in (64, 32):
            if backward_shared(K, tile, part, precision, has_f, has_z, map_bytes) <= held:
                return tile, part
        if tile.V == 16:
            return tile, CHUNK
        tile = tile._replace(V=tile.V // 2)


def map_bytes(d: int, dtype: torch.dtype, row_map: RowMap, chunks: int) -> int:
    """The bytes of the ``Rows`` of so many chunks, of rows that are d wide, and of ``Features``, in columns.cuh."""
    if row_map == AS_IS:
        return 0
    unit = 16 // dtype.itemsize
    return 2 * 16 * (chunks * (-(-d // unit) + 1) * 16 + (padded(row_map.width(d)) + 8) * dtype.itemsize)


def backward_shared(
    K: int, tile: Tile, part: int, precision: str, has_f: bool, has_z: bool, map_bytes: Callable[[int], int]
) -> int:
    """The bytes of ``Shared`` in decay_gradients.cuh; ``map_bytes(chunks)`` are those of the feature map."""
    K, V = padded(K), tile.V
    chunks = part // CHUNK
    rows = (chunks + 1) * 16 * (K + 8 + V + 8) + 2 * 16 * 24
    memories = (chunks + 1) * V * (K + 8)
    sums = (3 if has_f else 2) * 16 * (K + 8) + (3 if has_z else 1) * 16 * (V + 8)
    kept = (rows + memories) * operand_bytes(precision) + 4 * (2 * 16 + K + V + sums) + scale_bytes(K, V)
    return kept + map_bytes(chunks)


def scale_bytes(K: int, V: int) -> int:
    """Of the products of gates."""
    return 4 * 4 * (K + V)


def operand_bytes(precision: str) -> int:
    """Of a number in a product."""
    return 2 if precision == "bf16" else 4
