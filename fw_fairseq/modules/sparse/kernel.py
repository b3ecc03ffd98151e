"""A sparse feed-forward layer for few tokens as one kernel, ``cuda/gathered.cu``, without gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...autograd import register
from ...ops.kernels import launch
from ...ops.kernels.compiler import WITHOUT_ASKING
from ...ops.kernels.launch import TYPES, why_not_run

SOURCE, WARPS = "gathered.cu", 8
NAMES = ("x", "A", "B", "c", "W1", "W2", "b")
POINTERS = (*NAMES, "y", "inner", "hidden", "chosen", "counters")
SIZES = ("R", "C", "rank", "units", "block")
PARAMS = np.dtype([*((name, "u8") for name in POINTERS), *((name, "i4") for name in SIZES)], align=True)
HELD = WITHOUT_ASKING - 3 * 1024  # bytes of shared memory for what a block reads of others; its own takes 1 or 2 KiB
COUNTERS: dict[tuple[torch.device, int], Tensor] = {}  # by device and size: 0 before and after each launch


def why_not(*operands: Tensor, block: int) -> str | None:
    """A sentence that says why the kernel cannot run on these operands, in the order of ``NAMES``; None where it can."""
    x, inner, outer, *_ = operands
    if reason := why_not_run(*operands):
        return reason
    if any(part.dtype != x.dtype for part in operands):
        return "the kernel of sparse feed-forward layers takes weights and inputs of one type"
    if shared_bytes(len(inner), len(outer) // block) > HELD:
        return f"the kernel of sparse feed-forward layers takes a rank up to {HELD // 4} and up to {HELD // 8} blocks of units"
    return None


def shared_bytes(rank: int, blocks: int) -> int:
    """The bytes of shared memory of a thread block."""
    return max(4 * rank, 8 * blocks)


def feed_forward(
    x: Tensor,
    inner: Tensor,
    outer: Tensor,
    controller_bias: Tensor,
    weight_in: Tensor,
    weight_out: Tensor,
    bias: Tensor,
    block: int,
) -> Tensor:
    """Returns the layer's output with ReLU, (R,C), for x (R,C), inner (rank,C), outer (F,rank), weight_in and weight_out (F,C)."""
    operands = [part.contiguous() for part in (x, inner, outer, controller_bias, weight_in, weight_out, bias)]
    x, (rows, width), (units, rank) = operands[0], x.shape, outer.shape
    blocks = units // block
    macros = defines(x.dtype, all(part.data_ptr() % 16 == 0 for part in operands), width, rank)
    y, spare = torch.empty_like(x), x.new_empty(rows * (rank + 2 * blocks), dtype=torch.float32)
    parts = spare.split([rows * rank, rows * blocks, rows * blocks])
    params = np.zeros((), PARAMS)
    for name, part in zip(POINTERS, (*operands, y, *parts, counters(x.device, 2 + 2 * rows))):
        params[name] = part.data_ptr()
    for name, size in zip(SIZES, (rows, width, rank, units, block)):
        params[name] = size
    items = -(-rank // WARPS) + blocks + -(-width // (32 * macros["FW_COLUMNS"]))
    launch.current()(SOURCE, "feed_forward", macros, (rows * items,), (32 * WARPS,), params, shared_bytes(rank, blocks), x.device)
    return y


def defines(dtype: torch.dtype, aligned: bool, width: int, rank: int) -> dict[str, Any]:
    """The macros of ``cuda/gathered.cu``."""
    vector = 16 // dtype.itemsize
    whole = aligned and width % vector == 0 and rank % vector == 0
    return {"FW_IN": TYPES[dtype], "FW_VECTOR": vector if whole else 1, "FW_COLUMNS": 4 // dtype.itemsize if whole else 1}


def counters(device: torch.device, count: int) -> Tensor:
    """Returns so many zeros, which a launch leaves as it found them. Launches of the default stream follow each other and share
    them. Another stream may be recorded in a graph, which is then replayed beside others, and its memory may be the graph's."""
    if device.type == "cuda" and torch.cuda.current_stream(device).cuda_stream:
        return torch.zeros(count, dtype=torch.int32, device=device)
    if (device, count) not in COUNTERS:
        COUNTERS[device, count] = torch.zeros(count, dtype=torch.int32, device=device)
    return COUNTERS[device, count]


def _fake(x: Tensor, *others) -> Tensor:
    return torch.empty_like(x)


OPERANDS = ", ".join(f"Tensor {name}" for name in ("x", "inner", "outer", "controller_bias", "weight_in", "weight_out", "bias"))
register("sparse_feed_forward", f"({OPERANDS}, int block) -> Tensor", feed_forward, _fake)
