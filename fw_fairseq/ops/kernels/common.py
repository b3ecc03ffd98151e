"""The checks, the tensors and the registration of operators that the modules of several kernels share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import launch

OLDEST = (8, 0)  # compute capability: the first with products of bf16 and tf32
SHARED = 99 * 1024  # bytes of shared memory that every device since compute capability 8.0 gives a block
TYPES = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}  # what kernels read and write
PRECISIONS = {"bf16": 0, "tf32": 1, "exact": 2}  # FW_PRECISION
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


def dense(x: Tensor) -> Tensor:
    """x with its last dimension contiguous, which every kernel relies on."""
    return x if x.stride(-1) == 1 else x.contiguous()


def in_units(x: Tensor) -> bool:
    """Whether every row of x can be moved 16 bytes at a time."""
    unit = 16 // x.element_size()
    return x.data_ptr() % 16 == 0 and all(n % unit == 0 for n in (*x.stride()[:-1], x.shape[-1]))


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
