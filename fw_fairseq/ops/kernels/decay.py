"""The kernel family with decay per channel (rule decay), without erase: what it supports, and the launches of ``cuda/decay.cu`` and
``cuda/decay_backward.cu``. ``families`` has the contract of a family, ``decay_tiles`` the layout of a launch.

fp16 inputs are multiplied in tf32, which holds them exactly. fp16 products would overflow where memories and gradients leave its
range, and bf16 would round the inputs once more.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...feature_maps import AS_IS, RowMap
from . import launch
from .common import OLDEST, PRECISIONS, TYPES, add_up, held_bytes, in_units, map_defines, precision_of, shares_of
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

LARGEST_K = 512
LARGEST_GRID = 65535  # along its second and third dimension
TENSOR = np.dtype([("data", "u8"), ("b", "i8"), ("h", "i8"), ("t", "i8"), ("share", "i8")])
TENSORS = ("q", "k", "v", "f", "z", "w", "y", "dy", "dq", "dk", "dv", "df", "dz", "dw")
MEMORIES = ("memory", "final_memory", "borders", "dfinal", "dmemory")
SIZES = ("T", "K", "V", "parts")
PARAMS = np.dtype([(n, TENSOR) for n in TENSORS] + [(n, "u8") for n in MEMORIES] + [(n, "i4") for n in SIZES], align=True)


COMPUTES, NEEDS = ("f per channel", "z per channel", "w per token"), ()
DIVIDES = False


def supported(q: Tensor, k: Tensor, v: Tensor, f, z, e, w, row_map: RowMap = AS_IS) -> str | None:
    K, V, (B, H) = row_map.width(q.shape[-1]), v.shape[-1], q.shape[:2]
    if K > LARGEST_K:
        return f"backend='cuda' has kernels without erase for keys up to {LARGEST_K} wide, not {K}"
    if B > LARGEST_GRID or H > LARGEST_GRID:
        return f"backend='cuda' has kernels without erase for up to {LARGEST_GRID} sequences and heads, not {B} and {H}"
    capability = launch.current().capability(q.device)
    if capability < OLDEST:
        return f"backend='cuda' has kernels without erase for compute capability {OLDEST[0]}.{OLDEST[1]} and higher only"
    gates = f is not None, z is not None
    precision, mapping = precision_of(q.dtype, "bf16" if q.dtype == torch.bfloat16 else "exact"), partial(map_bytes, q, row_map)
    held = held_bytes(q.device)
    needed = backward_shared(K, *choose_backward(K, V, precision, *gates, mapping, held), precision, *gates, mapping)
    if needed > held:
        return f"backend='cuda' needs {needed} bytes of shared memory for {q.dtype} keys {K} wide; this device has {held}"
    return None


def cut_backward(q, v, f, z, memory, precision: str, row_map: RowMap) -> tuple[Tile, int]:
    gates, mapping = (f is not None, z is not None), partial(map_bytes, q, row_map)
    return choose_backward(memory.shape[2], v.shape[3], precision_of(q.dtype, precision), *gates, mapping, held_bytes(q.device))


def saved_like(q, k, v, f, z, e, w, memory, precision: str, row_map: RowMap = AS_IS):
    """The memory before each part of the sequence but the first."""
    _, part = cut_backward(q, v, f, z, memory, precision, row_map)
    return [((*q.shape[:2], (q.shape[2] - 1) // part, *memory.shape[2:]), torch.float32)]


def forward(launcher, q, k, v, f, z, e, w, memory, precision: str, keep: bool = True, row_map: RowMap = AS_IS):
    """y, the final memory, and what ``backward`` needs; without ``keep`` that is nothing."""
    kept = saved_like(q, k, v, f, z, e, w, memory, precision, row_map) if keep else []
    _, part = cut_backward(q, v, f, z, memory, precision, row_map)
    precision = precision_of(q.dtype, precision)
    y, final_memory = torch.empty_like(v), torch.empty_like(memory)
    saved = tuple(memory.new_empty(shape, dtype=dtype) for shape, dtype in kept)
    tensors = {"q": q, "k": k, "v": v, "f": f, "z": z, "w": w, "y": y}
    memories = {"memory": memory, "final_memory": final_memory, "borders": saved[0] if keep else None}
    call = Call(choose_forward(memory.shape[2], v.shape[-1], precision), part, precision, tensors, memories, {}, row_map)
    call.run(launcher, "decay.cu", "decay_forward", forward_bytes(call))
    return y, final_memory, saved


def backward(launcher, q, k, v, f, z, e, w, memory, saved, dy, dmemory, precision: str, row_map: RowMap = AS_IS):
    """Gradients of q, k, v, f, z, e, w and memory; None for what is None."""
    V = memory.shape[3]
    tile, part = cut_backward(q, v, f, z, memory, precision, row_map)
    tiles = -(-V // tile.V)
    dq, dk, dv, df, dz, dw, dstart = (None if x is None else torch.empty_like(x) for x in (q, k, v, f, z, w, memory))
    shares = {
        "dq": shares_of(dq, tiles),
        "dk": shares_of(dk, tiles),
        "df": shares_of(df, tiles),
        "dw": shares_of(dw, tiles * tile.V // 16),
    }
    tensors = {"q": q, "k": k, "v": v, "f": f, "z": z, "w": w, "dy": dy, "dv": dv, "dz": dz}
    memories = {"memory": memory, "borders": saved[0], "dfinal": dmemory, "dmemory": dstart}
    call = Call(tile, part, precision_of(q.dtype, precision), tensors, memories, shares, row_map)
    call.run(launcher, "decay_backward.cu", "decay_backward", backward_bytes(call))
    for whole, share in zip((dq, dk, df, dw), shares.values()):
        add_up(whole, share)
    return dq, dk, dv, df, dz, None, dw, dstart


class Call(NamedTuple):
    """One launch: its layout and its tensors. ``shares`` have a leading dimension, over which they sum to the result."""

    tile: Tile
    part: int
    precision: str
    tensors: dict[str, Tensor | None]
    memories: dict[str, Tensor | None]
    shares: dict[str, Tensor | None]
    row_map: RowMap

    @property
    def K(self) -> int:
        return self.memories["memory"].shape[2]

    @property
    def row_chunks(self) -> int:
        """How many chunks have their rows in shared memory: two in turns in the forward, all chunks of a part in the backward."""
        return self.part // CHUNK if self.shares else 2

    def defines(self, shared_bytes: int) -> dict[str, int | str]:
        f, z, w, q = (self.tensors[n] for n in ("f", "z", "w", "q"))
        tile = self.tile
        return {
            "FW_IN": TYPES[q.dtype],
            "FW_K": padded(self.K),
            "FW_V": tile.V,
            "FW_F": int(f is not None),
            "FW_Z": int(z is not None),
            "FW_W": int(w is not None),
            "FW_PRECISION": PRECISIONS[self.precision],
            "FW_WARPS": tile.warps(padded(self.K)),
            "FW_K_WARPS": tile.k_warps,
            "FW_V_WARPS": tile.v_warps,
            "FW_PART": self.part,
            "FW_PAIRED": int(all(in_pairs(x) for x in self.paired_tensors() if x is not None)),
            "FW_SHARED": shared_bytes,
            "FW_PARTIAL": int(len(self.shares.get("dq", ())) > 1),
            **self.row_defines(),
        }

    def paired_tensors(self):
        rows = () if self.row_map == AS_IS else ("q", "k", "dq", "dk")
        shares = {name: None if x is None else x[0] for name, x in self.shares.items()}
        return [x for name, x in (self.tensors | shares).items() if name not in rows]

    def row_defines(self) -> dict[str, int]:
        q, k = self.tensors["q"], self.tensors["k"]
        if self.row_map == AS_IS:
            return {}
        return map_defines(self.row_map, q.shape[-1]) | {
            "FW_ROW_CHUNKS": self.row_chunks,
            "FW_ALIGNED": int(all(in_units(x) for x in (q, k))),
        }

    def params(self) -> np.ndarray:
        params = np.zeros((), PARAMS)
        for tensors, leading in ((self.tensors, 0), (self.shares, 1)):
            for name, x in tensors.items():
                if x is not None:
                    share = x.stride(0) if leading else 0
                    params[name] = (x.data_ptr(), *x.stride()[leading : leading + 3], share)
        for name, x in self.memories.items():
            params[name] = 0 if x is None else x.data_ptr()
        T = self.tensors["q"].shape[2]
        for name, size in zip(SIZES, (T, *self.memories["memory"].shape[2:], -(-T // self.part))):
            params[name] = size
        return params

    def run(self, launcher, source: str, kernel: str, shared_bytes: int) -> None:
        v = self.tensors["v"]
        grid = (-(-v.shape[-1] // self.tile.V), v.shape[1], v.shape[0])
        block = (32 * self.tile.warps(padded(self.K)),)
        launcher(source, kernel, self.defines(shared_bytes), grid, block, self.params(), shared_bytes, v.device)


def forward_bytes(call: Call) -> int:
    """The bytes of ``Shared`` in decay.cu."""
    K, V = padded(call.K), call.tile.V
    operands = (2 * 16 * (K + 8) + 16 * (V + 8)) * operand_bytes(call.precision)
    y = 4 * (call.tile.k_warps * 16 * (V + 8) if call.tile.k_warps > 1 else 4)
    reads = 4 * (4 if call.tensors["z"] is None else 16 * (V + 8))
    mapping = map_bytes(call.tensors["q"], call.row_map, call.row_chunks)
    return mapping + operands + y + reads + scale_bytes(K, V)


def backward_bytes(call: Call) -> int:
    gates = (call.tensors[name] is not None for name in "fz")
    mapping = partial(map_bytes, call.tensors["q"], call.row_map)
    return backward_shared(call.K, call.tile, call.part, call.precision, *gates, mapping)


def in_pairs(x: Tensor) -> bool:
    """Whether two neighbouring channels can be moved at once, in every row, and the way from row to row has 32 bits."""
    if x.dim() == 3:
        return True
    size = x.element_size()
    paired = x.shape[-1] % 2 == 0 and x.data_ptr() % (2 * size) == 0 and all(s % 2 == 0 for s in x.stride()[:-1])
    return paired and size * x.stride(2) < 2**31
