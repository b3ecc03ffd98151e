"""The checks, the tensors, the feature maps and the registration of operators that the modules of several kernels share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ... import Mistake
from ...row_map import AS_IS, RowMap
from . import launch

OLDEST = (8, 0)  # compute capability: the first with products of bf16 and tf32
SHARED = 99 * 1024  # bytes of shared memory that every device since compute capability 8.0 gives a block
TYPES = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}  # what kernels read and write
SHARED_MORE = {(8, 0): 163 * 1024, (8, 7): 163 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024, (10, 3): 227 * 1024}
PRECISIONS = {"bf16": 0, "tf32": 1, "exact": 2}  # FW_PRECISION
# The numbers of feature maps and norms in ``cuda/row_map.cuh``.
MAPS = {"identity": 1, "elu": 2, "relu": 3, "dpfp": 4}  # FW_MAP; 0, or no macro at all, for q and k that are features already
NORMS = {"none": 0, "sum": 1, "l2": 2}  # FW_NORM
# ``View`` and ``Params`` in ``cuda/rows.cuh``.
VIEW = np.dtype([("p", "u8"), ("b", "i8"), ("h", "i8"), ("t", "i8"), ("tile", "i8")])
VIEWS = ("q", "k", "v", "f", "e", "w", "y", "dy", "dq", "dk", "dv", "df", "de", "dw")
SHARES = ("dq", "dk", "df", "de", "dw")  # outputs that each tile of V has a share of, along a first dimension
POINTERS = ("memory", "final", "borders", "dfinal", "dmemory")
PARAMS = np.dtype([(name, VIEW) for name in VIEWS] + [(name, "u8") for name in POINTERS] + [(n, "i4") for n in "HTKV"], align=True)
ROWS = ("q", "k", "v", "y", "dy", "dq", "dk", "dv")
LIBRARY = torch.library.Library("fw_fairseq", "FRAGMENT")
OPERATORS: dict[str, Callable] = {}  # by name, the function that launches; tests run the same ones on an emulator


def why_not_run(*inputs: Tensor) -> str | None:
    """A sentence that says why no kernel runs on this device or takes these dtypes; None where one can."""
    if reason := launch.current().why_not(inputs[0].device):
        return reason
    for x in inputs:
        if x.dtype not in TYPES:
            return f"backend='cuda' has kernels for {', '.join(map(str, TYPES))}, not for {x.dtype}"
    return None


def why_no_map(row_map: RowMap) -> str | None:
    """A sentence that says why the kernels cannot make these features; None where they can."""
    for kind, name, known in (("feature map", row_map.name, MAPS), ("norm", row_map.norm, NORMS)):
        if name not in known:
            return f"backend='cuda' has no {kind} {name!r} in its kernels, which have: {', '.join(known)}"
    return None


def map_defines(row_map: RowMap, width: int) -> dict[str, int]:
    """The macros of ``cuda/row_map.cuh`` for rows this wide; none for rows that are features already."""
    if row_map == AS_IS:
        return {}
    if reason := why_no_map(row_map):
        raise Mistake(reason)
    return {"FW_MAP": MAPS[row_map.name], "FW_D": width, "FW_NU": row_map.nu, "FW_NORM": NORMS[row_map.norm]}


def dense(x: Tensor) -> Tensor:
    """x with its last dimension contiguous, which every kernel relies on."""
    return x if x.stride(-1) == 1 else x.contiguous()


def in_units(x: Tensor) -> bool:
    """Whether every row of x can be moved 16 bytes at a time."""
    unit = 16 // x.element_size()
    return x.data_ptr() % 16 == 0 and all(n % unit == 0 for n in (*x.stride()[:-1], x.shape[-1]))


def round_up(n, multiple: int):
    return (n + multiple - 1) // multiple * multiple


def tile_bytes(rows: int, width: int, dtype: torch.dtype) -> int:
    """The bytes of a tile in shared memory (``tile_stride`` in cuda/tile.cuh): each row is 16 bytes longer than its data."""
    return rows * (width * dtype.itemsize + 16)


def rows_aligned(views: dict[str, Tensor | None]) -> bool:
    """Whether all rows of inputs and of their gradients can be moved 16 bytes at a time; says once where they cannot."""
    aligned = all(in_units(x[0] if name in SHARES else x) for name, x in views.items() if name in ROWS)
    if not aligned:
        launch.log_once(
            "rows of q, k or v do not start at multiples of 16 bytes", "kernels move their numbers one by one, which is slow"
        )
    return aligned


def pack_params(views: dict[str, Tensor | None], pointers: dict[str, Tensor | None], key: int) -> np.ndarray:
    """The ``Params`` of cuda/rows.cuh. Tensors in ``SHARES`` have a leading dimension over tiles of V."""
    params = np.zeros((), PARAMS)
    for name, x in views.items():
        if x is not None:
            strides = x.stride() if name in SHARES else (0, *x.stride())
            params[name] = (x.data_ptr(), *strides[1:4], strides[0])
    for name, x in pointers.items():
        params[name] = 0 if x is None else x.data_ptr()
    _, params["H"], params["T"], _ = views["q"].shape
    params["K"], params["V"] = key, views["v"].shape[3]
    return params


def held_bytes(device: torch.device) -> int:
    """The bytes of shared memory that a block can have on this device, or on any if the launcher in use is for other ones."""
    if device.type != launch.current().device_type:
        return SHARED
    return SHARED_MORE.get(launch.current().capability(device), SHARED)


def shares_of(whole: Tensor | None, count: int) -> Tensor | None:
    """Room for ``count`` fp32 shares that sum to ``whole``; for one share ``whole`` itself, with a leading dimension of 1."""
    if whole is None or count == 1:
        return None if whole is None else whole[None]
    return whole.new_empty(count, *whole.shape, dtype=torch.float32)


def add_up(whole: Tensor | None, shares: Tensor | None) -> None:
    """Writes the sum of the shares from ``shares_of`` into ``whole``."""
    if shares is not None and len(shares) > 1:
        whole.copy_(shares.sum(0))


def register_operator(
    name: str, schema: str, run: Callable, fake: Callable, setup_context: Callable | None = None, backward: Callable | None = None
) -> None:
    """Defines ``torch.ops.fw_fairseq.<name>``, which ``torch.compile`` keeps in one graph.

    Args:
        schema: the arguments and the results in torch.library's notation, ``(Tensor q, ...) -> Tensor``.
        run: what the operator does on a GPU.
        fake: returns tensors with the shapes, dtypes and strides of the results, for tracing; sizes may be symbolic.
        setup_context, backward: the two halves of its gradient as for ``torch.library.register_autograd``; none without both.
    """
    OPERATORS[name] = run
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, run, "CUDA")
    torch.library.register_fake(f"fw_fairseq::{name}", fake, lib=LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"fw_fairseq::{name}", backward, setup_context=setup_context, lib=LIBRARY)
