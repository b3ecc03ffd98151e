"""The kernels of decoding, without gradients: one token of the recurrence, ``cuda/step.cu``, and one token that reads memories
which do not change, ``cuda/read.cu``."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...autograd import call, register
from ...feature_maps import AS_IS, RowMap
from ...rules import Coefficients
from . import launch
from .family import Divided, Operands
from .launch import TYPES, dense, map_defines, start, why_no_map, why_not_run
from .parameters import Kernel, Structure
from .recurrence import DIVIDED, INPUTS, ROW_MAP, kinds

SOURCE, COLUMNS, WARPS = "step.cu", 32, 16
ROWS = (8, 16, 32)  # of the memory in the registers of a warp
LARGEST_KEY = WARPS * ROWS[-1]
COMPUTES = (
    "f per token",
    "f per channel",
    "z per channel",
    "e per token",
    "e per channel",
    "w per token",
)  # in the words of ``recurrence.kinds``
VIEW = np.dtype([("p", "u8"), ("stride_b", "i8"), ("stride_h", "i8")])
VIEWS = ("q", "k", "v", "f", "z", "e", "w", "memory", "y", "memory_out", "sums", "sums_out")
SIZES = (("order", "u8"), *((name, "i4") for name in "HKV"))
PARAMS = np.dtype([*((name, VIEW) for name in VIEWS), *SIZES, ("eps", "f4"), ("least", "f4")], align=True)
READ_PARAMS = np.dtype([*((name, VIEW) for name in ("q", "memory", "sums", "y")), *SIZES, ("eps", "f4")], align=True)
STRUCTURE, READ_STRUCTURE = Structure(PARAMS), Structure(READ_PARAMS)


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor | None,
    z: Tensor | None,
    e: Tensor | None,
    w: Tensor | None,
    memory: Tensor,
    row_map: RowMap = AS_IS,
    y: Tensor | None = None,
    memory_out: Tensor | None = None,
    order: Tensor | None = None,
    divided: Divided | None = None,
) -> tuple[Tensor, Tensor]:
    """q, k (B,H,K), v (B,H,V), f, e (B,H) or (B,H,K), z (B,H,V), w (B,H), memory (B,H,K,V) fp32 -> y (B,H,V), the new memory.

    row_map: makes features of q and k, which are then (B,H,D). memory_out: where the new memory goes, ``memory`` itself for an
    update in place. With y and memory_out given nothing is allocated, and the call can be captured in a CUDA graph once it has run.
    order: (B) long, row b continues from row order[b] of memory, and memory_out is another tensor. B is then that of q.
    divided: y is divided; its ``sums`` are (B,H,K) and in the same order, its ``final`` is another tensor.
    """
    y = torch.empty_like(v) if y is None else y
    memory_out = memory.new_empty(len(q), *memory.shape[1:]) if memory_out is None else memory_out
    batch, heads, key, value = len(q), *memory.shape[1:]
    sums = (None, None) if divided is None else (divided.sums, divided.final)
    tensors = dict(zip(VIEWS, (q, k, v, f, z, e, w, memory, y, memory_out, *sums))) | {"order": order}
    divisor = (0.0, 0.0) if divided is None else (divided.eps, divided.least)

    def describe() -> Kernel:
        macros = defines(v.dtype, f, z, e, w, choose_rows(key)) | map_defines(row_map, q.shape[-1])
        macros |= {} if divided is None else {"FW_SUMS": 1}
        sizes = {"H": heads, "K": key, "V": value, "eps": divisor[0], "least": divisor[1]}
        return Kernel(SOURCE, "step", macros, *shape(batch, heads, key, value), 0, sizes)

    start(launch.current(), STRUCTURE, (row_map, divisor), tensors, describe)
    return y, memory_out


def read(q: Tensor, memory: Tensor, sums: Tensor | None, order: Tensor, eps: float, row_map: RowMap, y: Tensor) -> Tensor:
    """q (R,H,K), or rows (R,H,D) that ``row_map`` makes features of, memory (S,H,K,V) and sums (S,H,K) in fp32, order (R) long ->
    y (R,H,V): row i reads memory order[i], divided by what it reads of the sums where there are any. Nothing is allocated."""
    heads, key, value = memory.shape[1:]

    def describe() -> Kernel:
        macros = {"FW_IN": TYPES[q.dtype], "FW_OUT": TYPES[y.dtype], "FW_SUMS": int(sums is not None), "FW_ROWS": choose_rows(key)}
        macros |= map_defines(row_map, q.shape[-1])
        sizes = {"H": heads, "K": key, "V": value, "eps": eps}
        return Kernel("read.cu", "read_memory", macros, *shape(len(q), heads, key, value), 0, sizes)

    tensors = {"q": q, "memory": memory, "sums": sums, "y": y, "order": order}
    start(launch.current(), READ_STRUCTURE, (row_map, eps), tensors, describe)
    return y


def shape(batch: int, heads: int, key: int, value: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The grid and the block of a launch."""
    return (batch * heads, -(-value // COLUMNS)), (COLUMNS, -(-key // choose_rows(key)))


def choose_rows(key: int) -> int:
    """The fewest rows a warp with at most ``WARPS`` warps: more warps hide more of the memory's latency."""
    return next(rows for rows in ROWS if rows * WARPS >= key)


def defines(
    dtype: torch.dtype, f: Tensor | None, z: Tensor | None, e: Tensor | None, w: Tensor | None, rows: int
) -> dict[str, object]:
    """The macros of ``cuda/step.cu``."""
    by_axis = {f"FW_{name}": 0 if x is None else x.dim() - 1 for name, x in (("F", f), ("E", e))}
    present = {f"FW_{name}": int(x is not None) for name, x in (("Z", z), ("W", w))}
    return {"FW_IN": TYPES[dtype], **by_axis, **present, "FW_ROWS": rows}


def why_not(q: Tensor, v: Tensor, coefficients: Coefficients, row_map: RowMap = AS_IS) -> str | None:
    """A sentence that says why ``step`` cannot run on these inputs; None where it can."""
    return why_not_run(q, v) or why_no_map(row_map) or unsupported(q, coefficients, row_map)


def unsupported(q: Tensor, coefficients: Coefficients, row_map: RowMap) -> str | None:
    """The same for a device, dtypes and a map that kernels can have."""
    if strange := [kind for kind in kinds(coefficients) if kind not in COMPUTES]:
        return f"the decoding kernel does not compute {', '.join(strange)}, only {', '.join(COMPUTES)}"
    if (key := row_map.width(q.shape[-1])) > LARGEST_KEY:
        return f"the decoding kernel takes keys up to {LARGEST_KEY} wide, not {key}"
    return None


def step_cuda_form(x: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """As ``recurrence.run_whole``, for one token and without gradients; the memory it is given stays as it is."""
    token = [None if part is None else dense(part).squeeze(2) for part in x[:7]]
    sums, eps, least = (None, 0.0, 0.0) if x.divided is None else (x.divided.sums, x.divided.eps, x.divided.least)
    before = [None if part is None else part.contiguous() for part in (x.memory, sums)]
    y, memory, sums = call("step", *token, *before, eps, least, *x.row_map)
    return y.unsqueeze(2), memory, sums


def _step(*inputs) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, f, z, e, w, memory, sums, eps, least, *row_map = inputs
    after = memory.new_empty(0) if sums is None else torch.empty_like(sums)
    divided = None if sums is None else Divided(eps, least, sums, after)
    return *step(q, k, v, f, z, e, w, memory, RowMap(*row_map), divided=divided), after


def _step_fake(*inputs) -> tuple[Tensor, Tensor, Tensor]:
    v, memory, sums = inputs[2], inputs[7], inputs[8]
    return torch.empty_like(v), torch.empty_like(memory), memory.new_empty(0) if sums is None else torch.empty_like(sums)


register("step", f"({INPUTS}, Tensor memory, {DIVIDED}, {ROW_MAP}) -> (Tensor, Tensor, Tensor)", _step, _step_fake)
