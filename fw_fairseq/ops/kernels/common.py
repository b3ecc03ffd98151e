"""What the modules of several kernels share: their names for types, the devices that they need, rows and shares of gradients."""

from __future__ import annotations

import torch
from torch import Tensor

OLDEST = (8, 0)  # products of bf16 and tf32 start there
SHARED = 99 * 1024  # bytes of shared memory that every device since compute capability 8.0 gives a block
TYPES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
PRECISIONS = {"bf16": 0, "tf32": 1, "exact": 2}


def in_units(x: Tensor) -> bool:
    """Whether 16 bytes of a row can be moved at once, in every row."""
    unit = 16 // x.element_size()
    return x.data_ptr() % 16 == 0 and all(n % unit == 0 for n in (*x.stride()[:-1], x.shape[-1]))


def shares_of(whole: Tensor | None, count: int) -> Tensor | None:
    """Room for ``count`` fp32 shares that sum to the tensor; the tensor itself for one."""
    if whole is None or count == 1:
        return None if whole is None else whole[None]
    return whole.new_empty(count, *whole.shape, dtype=torch.float32)


def add_up(whole: Tensor | None, shares: Tensor | None) -> None:
    """The shares of ``shares_of`` into their tensor."""
    if shares is not None and len(shares) > 1:
        whole.copy_(shares.sum(0))
