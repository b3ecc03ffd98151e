"""The pooling kernels beside their definition."""

from __future__ import annotations

import torch
from support.definitions import by_definition
from support.draws import assert_same

from fw_fairseq.ops.scans.pooling import pool

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def draw(length: int, width: int, dtype=torch.float32, batch=2, heads=2) -> tuple[torch.Tensor, torch.Tensor]:
    """Values as a view of a projection (T,B,C)."""
    values = torch.randn(length, batch, heads, 3 * width)[..., width : 2 * width].permute(1, 2, 0, 3)
    return torch.randn(batch, heads, length) * 3, values.to(dtype)


def results(form, a, x) -> dict[str, torch.Tensor]:
    leaves = [a.detach().requires_grad_(), x.detach().requires_grad_()]
    y = form(*leaves)
    adjoint = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return {"y": y.detach()} | dict(zip(("scores", "values"), torch.autograd.grad(y, leaves, adjoint)))


def compare(a, x, window, padding=None, reset=None) -> None:
    expected = results(lambda a, x: by_definition(a, x, window, padding, reset), a.double(), x.double())
    actual = results(lambda a, x: pool(a, x, window, None, padding, reset, backend="cuda")[0], a, x)
    assert actual["y"].dtype == actual["values"].dtype == x.dtype and actual["scores"].dtype == torch.float32
    assert_same(actual, expected, TOLERANCE[x.dtype])
