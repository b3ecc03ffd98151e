"""The kernels without erase (sum, gated, decay), ``cuda/decay.cu`` and ``cuda/decay_backward.cu``: what they take, their tiles, their launch.

``launch(source_file, kernel_name, defines, grid, block, params, shared_bytes, device)`` runs a kernel: on a GPU, or emulated.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CHUNK = 16
LARGEST_K = 512
MIN_ARCH = 80  # products of bf16 and tf32 start there
TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
PRECISIONS = {"bf16": 0, "tf32": 1, "exact": 2}
TENSOR = np.dtype([("data", "u8"), ("b", "i8"), ("h", "i8"), ("t", "i8"), ("part", "i8")])
TENSORS = ("q", "k", "v", "f", "z", "w", "y", "dy", "dq", "dk", "dv", "df", "dz", "dw")
MEMORIES = ("memory", "final_memory", "borders", "dfinal", "dmemory")
SIZES = ("T", "K", "V", "segments")
PARAMS = np.dtype([(n, TENSOR) for n in TENSORS] + [(n, "u8") for n in MEMORIES] + [(n, "i4") for n in SIZES])


class Tile(NamedTuple):
    """How a block is laid out: V channels of its tile, warps that share the memory along K and along V, tokens between borders."""

    V: int
    k_warps: int
    v_warps: int
    segment: int = 64

    def warps(self, K: int) -> int:
        """Enough for the memory, and one for 32 columns."""
        return max(self.k_warps * self.v_warps, -(-K // 32) + -(-self.V // 32))


# By K, padded: the widest tile. A memory is 32 to 64 fp32 registers a thread.
FORWARD = {
    16: Tile(64, 1, 4),
    32: Tile(64, 1, 4),
    64: Tile(128, 1, 8),
    128: Tile(128, 1, 8),
    256: Tile(64, 2, 4),
    512: Tile(32, 8, 2),
}
BACKWARD = {
    16: Tile(64, 1, 4),
    32: Tile(64, 1, 4),
    64: Tile(64, 1, 4),
    128: Tile(64, 2, 4),
    256: Tile(32, 4, 2),
    512: Tile(16, 16, 1),
}


def padded(width: int) -> int:
    """The power of two from 16 on that has room."""
    return max(16, 1 << (width - 1).bit_length())


def choose_tile(table: dict[int, Tile], K: int, V: int) -> Tile:
    """The table's tile, no wider than V needs."""
    tile = table[padded(K)]
    width = min(tile.V, padded(V))
    return tile._replace(V=width, v_warps=min(tile.v_warps, width // 16))


def choose_segment(K: int, V: int, precision: str) -> int:
    return 64


def supported(q: Tensor, k: Tensor, v: Tensor, f, z, e, w) -> str | None:
    """Why the kernels cannot run this, or None."""
    if e is not None:
        return "the kernels for sum, gated and decay have no erase"
    if q.dtype not in TYPES:
        return f"the kernels take float32, float16 and bfloat16, not {q.dtype}"
    if q.shape[-1] > LARGEST_K:
        return f"the kernels take keys of up to {LARGEST_K} channels after the feature map, not {q.shape[-1]}"
    return None


def forward(launch, q, k, v, f, z, e, w, memory, precision: str, keep: bool = True):
    """y, the final memory, and what ``backward`` needs; without ``keep`` that is nothing."""
    q, k, v, f, z, w = (contiguous_channels(x) for x in (q, k, v, f, z, w))
    memory = memory.contiguous()
    K, V = q.shape[-1], v.shape[-1]
    tile, segment = choose_tile(FORWARD, K, V), choose_segment(K, V, precision)
    y, final_memory = torch.empty_like(v), torch.empty_like(memory)
    later_segments = -(-q.shape[2] // segment) - 1
    borders = memory.new_empty(*q.shape[:2], later_segments, K, V) if keep and later_segments else None
    inputs = {"q": q, "k": k, "v": v, "f": f, "z": z, "w": w}
    call = Call(tile, segment, precision, inputs | {"y": y}, {"memory": memory, "final_memory": final_memory, "borders": borders})
    call.run(launch, "decay.cu", "decay_forward", forward_bytes(call))
    return y, final_memory, (borders,)


def backward(launch, q, k, v, f, z, e, w, memory, saved, dy, dmemory, precision: str):
    """Gradients of q, k, v, f, z, e, w and memory; None for what is None."""
    q, k, v, f, z, w, dy = (contiguous_channels(x) for x in (q, k, v, f, z, w, dy.to(v.dtype)))
    K, V = q.shape[-1], v.shape[-1]
    tile, segment = choose_tile(BACKWARD, K, V), choose_segment(K, V, precision)
    parts = -(-V // tile.V)
    dq, dk = (torch.empty_like(q)[None] if parts == 1 else q.new_empty(parts, *q.shape, dtype=torch.float32) for _ in "qk")
    dv, dz = (None if x is None else torch.empty_like(x) for x in (v, z))
    df = None if f is None else f.new_empty(parts * (1 if f.dim() == 4 else -(-padded(K) // 32)), *f.shape)
    dw = None if w is None else w.new_empty(parts * -(-tile.V // 32), *w.shape)
    dstart = memory.new_empty(memory.shape)
    memories = {"memory": memory.contiguous(), "borders": saved[0], "dmemory": dstart}
    memories["dfinal"] = None if dmemory is None else dmemory.contiguous()
    inputs = {"q": q, "k": k, "v": v, "f": f, "z": z, "w": w, "dy": dy}
    call = Call(tile, segment, precision, inputs | {"dv": dv, "dz": dz}, memories, {"dq": dq, "dk": dk, "df": df, "dw": dw})
    call.run(launch, "decay_backward.cu", "decay_backward", backward_bytes(call))
    dq, dk = (x[0] if parts == 1 else x.sum(0).to(q.dtype) for x in (dq, dk))
    df, dw = (None if x is None else x[0] if len(x) == 1 else x.sum(0) for x in (df, dw))
    return dq, dk, dv, df, dz, None, dw, dstart


class Call(NamedTuple):
    """One launch: its layout and its tensors; ``shares`` have a leading dimension of parts that sum to the result."""

    tile: Tile
    segment: int
    precision: str
    tensors: dict[str, Tensor | None]
    memories: dict[str, Tensor | None]
    shares: dict[str, Tensor | None] = {}  # noqa: RUF012 - never changed

    @property
    def K(self) -> int:
        return self.tensors["q"].shape[-1]

    def defines(self) -> dict[str, int | str]:
        f, z, w, q = (self.tensors[n] for n in ("f", "z", "w", "q"))
        tile = self.tile
        return {
            "FW_IN": TYPES[q.dtype],
            "FW_K": padded(self.K),
            "FW_V": tile.V,
            "FW_F": 0 if f is None else 1 if f.dim() == 3 else 2,
            "FW_Z": int(z is not None),
            "FW_W": int(w is not None),
            "FW_PRECISION": PRECISIONS[self.precision],
            "FW_WARPS": tile.warps(padded(self.K)),
            "FW_K_WARPS": tile.k_warps,
            "FW_V_WARPS": tile.v_warps,
            "FW_SEGMENT": self.segment,
            "FW_PAIRED": int(all(in_pairs(x) for x in self.all_tensors() if x is not None)),
            "FW_PARTIAL": int(len(self.shares.get("dq", ())) > 1),
        }

    def all_tensors(self):
        return (*self.tensors.values(), *self.shares.values())

    def params(self) -> np.ndarray:
        params = np.zeros((), PARAMS)
        for tensors, leading in ((self.tensors, 0), (self.shares, 1)):
            for name, x in tensors.items():
                if x is not None:
                    part = x.stride(0) if leading else 0
                    params[name] = (x.data_ptr(), *x.stride()[leading : leading + 3], part)
        for name, x in self.memories.items():
            params[name] = 0 if x is None else x.data_ptr()
        q, v = self.tensors["q"], self.tensors["v"]
        for name, size in zip(SIZES, (*q.shape[2:], v.shape[-1], -(-q.shape[2] // self.segment))):
            params[name] = size
        return params

    def run(self, launch, source: str, kernel: str, shared_bytes: int) -> None:
        v = self.tensors["v"]
        grid = (-(-v.shape[-1] // self.tile.V), v.shape[1], v.shape[0])
        block = (32 * self.tile.warps(padded(self.K)),)
        launch(source, kernel, self.defines(), grid, block, self.params(), shared_bytes, v.device)


def forward_bytes(call: Call) -> int:
    """Of ``Shared`` in decay.cu."""
    K, V = padded(call.K), call.tile.V
    operands = (2 * 16 * (K + 8) + 16 * (V + 8)) * operand_bytes(call.precision)
    y = 4 * call.tile.k_warps * 16 * (V + 8)
    reads = 4 * (2 if call.tensors["z"] is None else 16 * (V + 8))
    return operands + y + reads + scale_bytes(K, V)


def backward_bytes(call: Call) -> int:
    return backward_shared(call.K, call.tile, call.segment, call.precision, call.tensors["f"] is not None, call.tensors["z"] is not None)


def backward_shared(K: int, tile: Tile, segment: int, precision: str, has_f: bool, has_z: bool) -> int:
    """Of ``Shared`` in decay_backward.cu."""
    K, V = padded(K), tile.V
    chunk = 2 * 16 * (K + 8) + 2 * 16 * (V + 8) + 2 * 16 * 24
    memories = (segment // CHUNK + 1) * V * (K + 8)
    sums = (3 if has_f else 2) * 16 * (K + 8) + (3 if has_z else 1) * 16 * (V + 8)
    return (chunk + memories) * operand_bytes(precision) + 4 * (2 * 16 + sums) + scale_bytes(K, V)


def scale_bytes(K: int, V: int) -> int:
    return 4 * 3 * (K + V)


def operand_bytes(precision: str) -> int:
    return 2 if precision == "bf16" else 4


def contiguous_channels(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.dim() == 3 or x.stride(-1) == 1 else x.contiguous()


def in_pairs(x: Tensor) -> bool:
    """Whether two neighbouring channels can be moved at once, in every row."""
    if x.dim() == 3:
        return True
    size = 2 * x.element_size()
    return x.shape[-1] % 2 == 0 and x.data_ptr() % size == 0 and all(s % 2 == 0 for s in x.stride()[:-1])
