"""The kernel family with decay per channel (rule decay), without erase: what it supports, and the launches of ``cuda/decay.cu`` and
``cuda/decay_backward.cu``. ``decay_tiles`` has the layout of a launch.

fp16 inputs are multiplied in tf32, which holds them exactly. fp16 products would overflow where memories and gradients leave its
range, and bf16 would round the inputs once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...feature_maps import AS_IS, RowMap
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
from .family import Family, Gradients, Launcher, Operands, Results
from .launch import PRECISIONS, TYPES, add_up, held_bytes, in_units, map_defines, shares_of, why_not_held, why_not_wide

LARGEST_K = 512
LARGEST_GRID = 65535  # along its second and third dimension
TENSOR = np.dtype([("data", "u8"), ("b", "i8"), ("h", "i8"), ("t", "i8"), ("share", "i8")])
TENSORS = ("q", "k", "v", "f", "z", "w", "y", "dy", "dq", "dk", "dv", "df", "dz", "dw")
MEMORIES = ("memory", "final_memory", "borders", "dfinal", "dmemory")
SIZES = ("T", "K", "V", "parts")
PARAMS = np.dtype([(n, TENSOR) for n in TENSORS] + [(n, "u8") for n in MEMORIES] + [(n, "i4") for n in SIZES], align=True)


def supported(x: Operands) -> str | None:
    """``Family.supported``."""
    K, V, (B, H) = *x.memory.shape[2:], x.q.shape[:2]
    if B > LARGEST_GRID or H > LARGEST_GRID:
        return f"backend='cuda' has kernels without erase for up to {LARGEST_GRID} sequences and heads, not {B} and {H}"
    if reason := why_not_wide("without erase", x.q, K, LARGEST_K):
        return reason
    gates, mapping = (x.f is not None, x.z is not None), partial(map_bytes, x.q, x.row_map)
    cut = choose_backward(K, V, x.precision, *gates, mapping, held_bytes(x.q.device))
    return why_not_held(x.q, K, backward_shared(K, *cut, x.precision, *gates, mapping))


def cut_backward(x: Operands) -> tuple[Tile, int]:
    """The tile of the backward and the tokens of its parts."""
    gates, mapping = (x.f is not None, x.z is not None), partial(map_bytes, x.q, x.row_map)
    return choose_backward(x.memory.shape[2], x.memory.shape[3], x.precision, *gates, mapping, held_bytes(x.q.device))


def saved_like(x: Operands) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """The memory before each part of the sequence but the first."""
    _, part = cut_backward(x)
    return [((*x.q.shape[:2], (x.q.shape[2] - 1) // part, *x.memory.shape[2:]), torch.float32)]


def forward(launcher: Launcher, x: Operands, keep: bool = True) -> Results:
    """``Family.forward``."""
    kept, (_, part), precision = saved_like(x) if keep else [], cut_backward(x), x.precision
    y, final_memory = torch.empty_like(x.v), torch.empty_like(x.memory)
    saved = tuple(x.memory.new_empty(shape, dtype=dtype) for shape, dtype in kept)
    tensors = {"q": x.q, "k": x.k, "v": x.v, "f": x.f, "z": x.z, "w": x.w, "y": y}
    memories = {"memory": x.memory, "final_memory": final_memory, "borders": saved[0] if keep else None}
    call = Pass(choose_forward(x.memory.shape[2], x.memory.shape[3], precision), part, precision, tensors, memories, {}, x.row_map)
    call.launch(launcher, "decay.cu", "decay_forward", forward_bytes(call))
    return y, final_memory, saved


def backward(launcher: Launcher, x: Operands, saved: Sequence[Tensor], dy: Tensor, dmemory: Tensor) -> Gradients:
    """``Family.backward``."""
    tile, part = cut_backward(x)
    tiles = -(-x.memory.shape[3] // tile.V)
    inputs = (x.q, x.k, x.v, x.f, x.z, x.w, x.memory)
    dq, dk, dv, df, dz, dw, dstart = (None if whole is None else torch.empty_like(whole) for whole in inputs)
    counts = (("dq", dq, tiles), ("dk", dk, tiles), ("df", df, tiles), ("dw", dw, tiles * tile.V // 16))
    shares = {name: shares_of(whole, count) for name, whole, count in counts}
    tensors = {"q": x.q, "k": x.k, "v": x.v, "f": x.f, "z": x.z, "w": x.w, "dy": dy, "dv": dv, "dz": dz}
    memories = {"memory": x.memory, "borders": saved[0], "dfinal": dmemory, "dmemory": dstart}
    call = Pass(tile, part, x.precision, tensors, memories, shares, x.row_map)
    call.launch(launcher, "decay_backward.cu", "decay_backward", backward_bytes(call))
    for whole, share in zip((dq, dk, df, dw), shares.values()):
        add_up(whole, share)
    return dq, dk, dv, df, dz, None, dw, dstart


class Pass(NamedTuple):
    """One launch: its layout and its tensors. ``shares`` have a leading dimension, over which they sum to the result."""

    tile: Tile
    part: int
    precision: str
    tensors: dict[str, Any]
    memories: dict[str, Any]
    shares: dict[str, Any]
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

    def paired_tensors(self) -> list[Any]:
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

    def launch(self, launcher: Launcher, source: str, kernel: str, shared_bytes: int) -> None:
        v = self.tensors["v"]
        grid = (-(-v.shape[-1] // self.tile.V), v.shape[1], v.shape[0])
        block = (32 * self.tile.warps(padded(self.K)),)
        launcher(source, kernel, self.defines(shared_bytes), grid, block, self.params(), shared_bytes, v.device)


def forward_bytes(call: Pass) -> int:
    """The bytes of ``Shared`` in decay.cu."""
    K, V = padded(call.K), call.tile.V
    operands = (2 * 16 * (K + 8) + 16 * (V + 8)) * operand_bytes(call.precision)
    y = 4 * (call.tile.k_warps * 16 * (V + 8) if call.tile.k_warps > 1 else 4)
    reads = 4 * (4 if call.tensors["z"] is None else 16 * (V + 8))
    mapping = map_bytes(call.tensors["q"], call.row_map, call.row_chunks)
    return mapping + operands + y + reads + scale_bytes(K, V)


def backward_bytes(call: Pass) -> int:
    """The bytes of ``Shared`` in decay_backward.cu."""
    gates = call.tensors["f"] is not None, call.tensors["z"] is not None
    mapping = partial(map_bytes, call.tensors["q"], call.row_map)
    return backward_shared(call.K, call.tile, call.part, call.precision, *gates, mapping)


def in_pairs(x: Tensor) -> bool:
    """Whether two neighbouring channels can be moved at once, in every row, and the way from row to row has 32 bits."""
    if x.dim() == 3:
        return True
    size = x.element_size()
    paired = x.shape[-1] % 2 == 0 and x.data_ptr() % (2 * size) == 0 and all(s % 2 == 0 for s in x.stride()[:-1])
    return paired and size * x.stride(2) < 2**31


FAMILY = Family(("f per channel", "z per channel", "w per token"), (), supported, saved_like, forward, backward)
