"""The parts that all hand-written autograd functions share."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def as_written(method):
    """Runs a forward or backward without autocast and without gradients: its products keep the dtypes that they are written with,
    and ``torch.export``, which traces a forward with gradients on, can trace it."""

    @functools.wraps(method)
    def run(ctx, *inputs):
        device = next((x.device.type for x in inputs if isinstance(x, Tensor)), "cpu")  # an input without a gradient comes as None
        with torch.no_grad(), torch.autocast(device, enabled=False):
            return method(ctx, *inputs)

    return run


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Returns whether autograd records what is done with any of these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
