"""Launches the kernels of ``cuda/delta.cu``: rules with erase and at most one decay gate per token (delta, gated_delta).

``launch(source_file, kernel_name, defines, grid, block, params, shared_bytes, device)`` runs a kernel: CuPy on a GPU, the emulator
in tests. Everything here is shapes, memory and the choice of a variant.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SOURCE = "delta.cu"
CHUNK = 16
LARGEST_KEY = 512
TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
OPERANDS = {2: torch.bfloat16, 4: torch.float32}
PRECISIONS = {"bf16": 0, "tf32": 1, "exact": 2}
VIEWS = ("q", "k", "v", "f", "e", "w", "y", "dy", "dq", "dk", "dv")
POINTERS = ("memory", "final", "borders", "dfinal", "dmemory", "df", "de", "dw")
VIEW = np.dtype([("p", "u8"), ("b", "i8"), ("h", "i8"), ("t", "i8")])
PARAMS = np.dtype(
    [(name, VIEW) for name in VIEWS]
    + [(name, "u8") for name in POINTERS]
    + [("dkey_tile", "i8"), ("dgate_tile", "i8")]
    + [(name, "i4") for name in "BHTKV"],
    align=True,
)


class Tiling(NamedTuple):
    """How a block is cut: FW_V columns of the memory, warps that share a column, tokens at a time forward and backward."""

    value: int
    ksplit: int
    span: int
    segment: int


# The widest key a row is for -> by bytes of an operand in shared memory.
TABLE = {
    (64, 2): Tiling(64, 1, 64, 32),
    (128, 2): Tiling(64, 1, 32, 16),
    (256, 2): Tiling(32, 2, 32, 16),
    (512, 2): Tiling(16, 4, 16, 16),
    (64, 4): Tiling(64, 1, 32, 16),
    (128, 4): Tiling(32, 2, 32, 16),
    (256, 4): Tiling(16, 4, 16, 16),
    (512, 4): Tiling(16, 4, 16, 16),
}


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def choose_tiling(key: int, value: int, operand_bytes: int) -> tuple[int, Tiling]:
    """(FW_K, Tiling) for widths key and value."""
    widest = next(width for width, size in TABLE if size == operand_bytes and width >= key)
    tiling = TABLE[widest, operand_bytes]
    return round_up(key, 16 * tiling.ksplit), tiling._replace(value=min(tiling.value, round_up(value, 16)))


def supported(q: Tensor, k: Tensor, v: Tensor, f, z, e, w) -> str | None:
    """Why the kernels cannot run this, or None."""
    if e is None:
        return "the kernels of delta.cu are for rules with an erase e"
    if z is not None:
        return "a decay z on the value side together with an erase has no kernel"
    if f is not None and f.dim() != 3:
        return "one decay gate per key channel together with an erase has no kernel; one per token has"
    if q.dtype not in TYPES:
        return f"q, k, v are {q.dtype}; the kernels are for {', '.join(map(str, TYPES))}"
    if q.shape[-1] > LARGEST_KEY:
        return f"keys have {q.shape[-1]} features; the kernels take up to {LARGEST_KEY}"
    return None


def forward(launch, q, k, v, f, z, e, w, memory, precision: str, keep: bool = True) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """y (B,H,T,V), the final memory and, with ``keep``, what ``backward`` needs besides the arguments."""
    call = Call(q, k, v, f, e, w, precision)
    B, H, T, K, V = call.sizes
    segments = -(-T // call.tiling.segment)
    size = (B * H * segments, call.tiles * call.tiling.value, call.key)
    borders = memory.new_empty(size if keep else 0, dtype=OPERANDS[call.operand_bytes])
    y, final = torch.empty_like(call.views["v"]), torch.empty_like(memory, memory_format=torch.contiguous_format)
    pointers = {"memory": memory.contiguous(), "final": final, "borders": borders if keep else None}
    call.run(launch, "delta.cu", "delta_forward", forward_shared, call.tiling.span, {"y": y}, pointers)
    return y, final, (borders,) if keep else ()


def backward(launch, q, k, v, f, z, e, w, memory, saved, dy, dmemory, precision: str) -> tuple[Tensor | None, ...]:
    """(dq, dk, dv, df, dz, de, dw, dmemory) from the gradients dy of y and dmemory of the final memory; None counts as 0."""
    call = Call(q, k, v, f, e, w, precision)
    B, H, T, K, _ = call.sizes
    tiles = call.tiles
    dy = torch.zeros_like(v) if dy is None else dy
    gates = {name: memory.new_empty(tiles, B, H, T) for name in ("df", "de", "dw")}
    if tiles > 1:
        keys = {name: memory.new_empty(tiles, B, H, T, K) for name in ("dq", "dk")}
    else:
        keys = {name: torch.empty_like(call.views[name[1:]])[None] for name in ("dq", "dk")}
    outputs = {name: x[0] for name, x in keys.items()} | {"dv": torch.empty_like(call.views["v"])}
    before = torch.empty_like(memory, memory_format=torch.contiguous_format)
    pointers = {name: x[0] for name, x in gates.items()} | {"dmemory": before, "borders": saved[0]}
    pointers["dfinal"] = None if dmemory is None else dmemory.float().contiguous()
    strides = {"dkey_tile": keys["dq"].stride(0), "dgate_tile": gates["df"].stride(0)}
    views = outputs | {"dy": row_contiguous(dy.to(v.dtype))}
    call.run(launch, "delta_backward.cu", "delta_backward", backward_shared, call.tiling.segment, views, pointers, strides)
    dq, dk = (x[0] if tiles == 1 else x.sum(0).to(q.dtype) for x in keys.values())
    df, de, dw = (None if x is None else gate[0] if tiles == 1 else gate.sum(0) for x, gate in zip((f, e, w), gates.values()))
    return dq, dk, outputs["dv"], df, None, de, dw, before


def row_contiguous(x: Tensor) -> Tensor:
    """x with its last dimension contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def view(x: Tensor) -> tuple[int, int, int, int]:
    return (x.data_ptr(), *x.stride()[:3])


class Call:
    """One launch: the variant that the arguments ask for, and the parameters."""

    def __init__(self, q, k, v, f, e, w, precision: str):
        self.sizes = (*q.shape, v.shape[3])
        self.precision = PRECISIONS[precision]
        self.operand_bytes = 2 if precision == "bf16" else 4
        self.key, self.tiling = choose_tiling(q.shape[3], v.shape[3], self.operand_bytes)
        self.tiles = -(-v.shape[3] // self.tiling.value)
        self.views = {name: row_contiguous(x) for name, x in zip("qkv", (q, k, v))}
        self.views |= {name: x for name, x in zip("few", (f, e, w)) if x is not None}
        self.f, self.w = f is not None, w is not None

    def run(self, launch, source, kernel, shared_bytes, span, views, pointers, strides=None):
        B, H, T, K, V = self.sizes
        views = self.views | views
        tiling = self.tiling
        defines = {
            "FW_IN": TYPES[views["q"].dtype],
            "FW_K": self.key,
            "FW_V": tiling.value,
            "FW_F": int(self.f),
            "FW_W": int(self.w),
            "FW_PRECISION": self.precision,
            "FW_KSPLIT": tiling.ksplit,
            "FW_SPAN": span,
            "FW_SEGMENT": tiling.segment,
            "FW_ALIGNED": int(all(map(aligned, (x for x in views.values() if x.dim() == 4)))),
            "FW_PARTIAL": int(self.tiles > 1),
        }
        defines["FW_SHARED"] = shared_bytes(defines, views["q"].element_size(), self.operand_bytes)
        params = np.zeros((), PARAMS)
        for name, x in views.items():
            params[name] = view(x)
        for name, x in pointers.items():
            params[name] = 0 if x is None else x.data_ptr()
        for name, x in ({} if strides is None else strides).items():
            params[name] = x
        for name, size in zip("BHTKV", self.sizes):
            params[name] = size
        block = tiling.value // 16 * tiling.ksplit * 32
        launch(source, kernel, defines, (B * H, self.tiles), (block,), params, defines["FW_SHARED"], views["q"].device)


def aligned(x: Tensor) -> bool:
    """Every row starts at a multiple of 16 bytes and is as many long."""
    unit = 16 // x.element_size()
    return x.data_ptr() % 16 == 0 and all(n % unit == 0 for n in (*x.stride()[:3], x.shape[3]))


def tile_bytes(rows: int, width: int, element: int) -> int:
    return rows * (width + 16 // element) * element


def solved_bytes(d: dict, operand: int) -> int:
    """The scores of a span."""
    return d["FW_SPAN"] // CHUNK * tile_bytes(CHUNK, CHUNK, operand)


def forward_shared(d: dict, element: int, operand: int) -> int:
    """sizeof(ForwardShared), which the kernel asserts."""
    stage = 2 * tile_bytes(d["FW_SPAN"], d["FW_K"], operand) + tile_bytes(d["FW_SPAN"], d["FW_V"], element) + 5 * 4 * d["FW_SPAN"]
    solved = d["FW_SPAN"] // CHUNK * (tile_bytes(CHUNK, CHUNK, 4) + tile_bytes(CHUNK, CHUNK, operand))
    return 2 * stage + solved + sums_bytes(d, 4)


def sums_bytes(d: dict, accumulators: int) -> int:
    return 16 if d["FW_KSPLIT"] == 1 else 2 * d["FW_V"] // 16 * d["FW_KSPLIT"] * accumulators * 32 * 16


def backward_shared(d: dict, element: int, operand: int) -> int:
    """sizeof(BackwardShared), which the kernel asserts."""
    span, key, value, warps = d["FW_SPAN"], d["FW_K"], d["FW_V"], d["FW_V"] // 16 * d["FW_KSPLIT"]
    chunks = span // CHUNK
    inputs = 2 * tile_bytes(span, key, operand) + 2 * tile_bytes(span, value, operand) + tile_bytes(span, value, element)
    memories = (chunks + 1) * tile_bytes(value, key, operand) + tile_bytes(CHUNK, value, operand)
    pairs = (2 + chunks) * tile_bytes(CHUNK, CHUNK, operand)
    solved = (2 * chunks + (chunks if d["FW_F"] else 1) + 2) * tile_bytes(CHUNK, CHUNK, 4)
    rows = 4 * (warps * 3 * CHUNK + CHUNK + 2 * (value // 16 * CHUNK + warps) + 5 * span)
    return inputs + memories + pairs + solved + round_up(rows, 16) + sums_bytes(d, 2)
