"""The parts that all hand-written autograd functions share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace

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


def once_differentiable(backward: Callable) -> Callable:
    """Decorates a backward whose results have no gradient. PyTorch's decorator of this name takes them for constants if the
    gradients that come in are constants, so that a penalty on a gradient is lost without a word; here that is an error too."""

    @functools.wraps(backward)
    def run(ctx, *gradients):
        if not torch.is_grad_enabled():  # nobody asked for create_graph
            return backward(ctx, *gradients)
        saved = ctx.saved_tensors  # once: with activation checkpointing, asking again computes again, or fails
        with torch.no_grad():
            found = backward(SimpleNamespace(**vars(ctx), saved_tensors=saved, needs_input_grad=ctx.needs_input_grad), *gradients)
        given = [x for x in found if x is not None]
        tied = iter(NoSecond.apply(len(given), *given, *(x for x in (*gradients, *saved) if needs_gradient(x))))
        return tuple(None if x is None else next(tied) for x in found)

    return run


class NoSecond(torch.autograd.Function):
    """The first ``count`` tensors as they are, tied to the others, which they were made of. Their gradient is refused."""

    @staticmethod
    def forward(ctx, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> Sequence[None]:
        raise RuntimeError(
            "a gradient of a gradient was asked for, and the backward of this operation is once_differentiable; fast_weight has"
            " such gradients with backend='recurrent'"
        )
