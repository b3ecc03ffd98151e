"""What the hand-written autograd functions share."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def as_written(method):
    """A forward or backward whose products keep the types they are written with, inside of autocast too, and that ``torch.export``,
    which traces a forward with gradients on, takes as it is."""

    @functools.wraps(method)
    def run(ctx, *inputs):
        device = next((x.device.type for x in inputs if isinstance(x, Tensor)), "cpu")  # no gradient at all comes as None
        with torch.no_grad(), torch.autocast(device, enabled=False):
            return method(ctx, *inputs)

    return run
