"""The parts that all hand-written autograd functions share, and a division whose gradient stays finite."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

import torch
from torch import Tensor

SMALLEST_LENGTH = 1e-12


def as_written(function):
    """Runs a forward or backward, of an autograd function or of an operator, without autocast and without gradients: its products
    keep the dtypes that they are written with, and ``torch.export``, which traces a forward with gradients on, can trace it."""

    @functools.wraps(function)
    def run(*inputs):
        device = next((x.device.type for x in inputs if isinstance(x, Tensor)), "cpu")  # an input without a gradient comes as None
        with torch.no_grad(), without_autocast(device):
            return function(*inputs)

    return run


def without_autocast(device: str) -> AbstractContextManager:
    """Products keep the dtypes that they are written with. ``device``: the type of the tensors' device; "meta" has no autocast."""
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)


def unit(x: Tensor) -> Tensor:
    """x divided by its length. A length below 1e-12 counts as that: a vector of zeros stays so, with a finite gradient."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.clamp(min=SMALLEST_LENGTH).masked_fill(length == 0, 1)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Returns whether autograd records what is done with any of these."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def slices_of(x: Tensor, spans: Sequence[slice]) -> Sequence[Tensor]:
    """Returns the spans of x (B,H,S,X) in S, which may overlap. Their gradients are added up in one tensor: the gradient of one
    index is as large as x, and that of many would take time that grows with the square of S."""
    if not needs_gradient(x) or torch.compiler.is_compiling():
        return [x[:, :, span] for span in spans]
    return Slices.apply(x, *spans)


class Slices(torch.autograd.Function):
    """The spans of a tensor."""

    @staticmethod
    @as_written
    def forward(ctx, x: Tensor, *spans: slice) -> tuple[Tensor, ...]:
        ctx.spans, ctx.length = spans, x.shape[2]
        return tuple(x[:, :, span] for span in spans)

    @staticmethod
    def backward(ctx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return Sum.apply(ctx.length, ctx.spans, *gradients), *(None for _ in ctx.spans)


class Sum(torch.autograd.Function):
    """A tensor of ``length`` tokens with the sum of what was given for its spans: the gradient of ``Slices``, which has one too."""

    @staticmethod
    @as_written
    def forward(ctx, length: int, spans: Sequence[slice], *parts: Tensor) -> Tensor:
        ctx.spans = spans
        first = parts[0]
        total = first.new_zeros(*first.shape[:2], length, first.shape[3])
        for span, part in zip(spans, parts):
            total[:, :, span] += part
        return total

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *Slices.apply(gradient, *ctx.spans)


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
