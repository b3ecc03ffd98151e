"""The kernel of sparse feed-forward layers beside its definition."""

from __future__ import annotations

import torch

from fw_fairseq.modules.sparse import kernel

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # y is rounded once to the type


def draw(rows: int, width: int, units: int, block: int, rank: int, dtype=torch.float32, device="cpu") -> list:
    shapes = (rows, width), (rank, width), (units, rank), (units,), (units, width), (units, width), (width,)
    return [torch.randn(*shape).to(device, dtype) for shape in shapes] + [block]


def by_loops(x, inner, outer, c, w1, w2, b, block: int) -> torch.Tensor:
    """The first of the largest logits of each block wins."""
    x, inner, outer, c, w1, w2, b = (part.double().cpu() for part in (x, inner, outer, c, w1, w2, b))
    y = b.repeat(len(x), 1)
    for row, token in zip(y, x):
        logits = (outer @ (inner @ token) + c).tolist()
        for first in range(0, len(logits), block):
            unit = max(range(first, first + block), key=lambda i: (logits[i], -i))
            row += max(float(w1[unit] @ token), 0.0) * w2[unit]
    return y


def compare(operands: list) -> None:
    y, expected = kernel.feed_forward(*operands), by_loops(*operands)
    assert y.dtype == operands[0].dtype and y.shape == operands[0].shape
    torch.testing.assert_close(y.double().cpu(), expected, rtol=0, atol=TOLERANCE[y.dtype] * expected.abs().max().item())
