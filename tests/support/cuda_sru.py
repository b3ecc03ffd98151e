"""The SRU kernels beside their equations."""

from __future__ import annotations

import torch
from support.definitions import NAMES, by_the_equations
from support.draws import assert_same

from fw_fairseq.ops.scans.sru import sru

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def draw(length: int, batch: int, width: int, dtype=torch.float32) -> list[torch.Tensor]:
    steps = [torch.randn(length, batch, 3 * width).mul(2).to(dtype), torch.randn(length, batch, width).to(dtype)]
    return [*steps, torch.randn(width), torch.randn(width), torch.randn(batch, width)]


def results(form, inputs, *masks, **options) -> dict[str, torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    h, c = form(*leaves, *masks, **options)
    generator = torch.Generator().manual_seed(1)
    adjoints = [torch.randn(x.shape, generator=generator).to(x) for x in (h, c)]
    return {"h": h.detach(), "c": c.detach()} | dict(zip(NAMES, torch.autograd.grad((h, c), leaves, adjoints)))


def compare(inputs, padded=False, with_resets=False) -> None:
    length, batch = inputs[0].shape[:2]
    masks = [torch.rand(batch, length, device=inputs[0].device) < 0.3 if wanted else None for wanted in (padded, with_resets)]
    expected = results(by_the_equations, [x.double() for x in inputs], *masks, scale=1.3)
    assert_same(results(sru, inputs, *masks, scale=1.3, backend="cuda"), expected, TOLERANCE[inputs[0].dtype])
