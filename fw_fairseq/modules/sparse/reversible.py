"""Reversible residual connections: a backward computes each layer's input from its output, so that no layer keeps activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from fairseq import utils
from torch import Tensor, nn

from ...autograd import once_differentiable
from ...feature_maps import wide


class Update(NamedTuple):
    """A part of a layer reads one stream and adds this to the other. ``source``: the encoder's output, or None."""

    run: Callable[[Tensor, Tensor | None], Tensor]
    parameters: list[nn.Parameter]


def run_updates(updates: Sequence[Update], x: Tensor, source: Tensor | None = None) -> Tensor:
    """Returns the mean of both streams after all updates; they start as x.

    Each update reads the second stream and adds to the first one, and then they change places. Streams are in fp32 at least,
    because the backward computes them again from the last ones.
    """
    first = second = wide(x)
    parameters = list(dict.fromkeys(p for update in updates for p in update.parameters if p.requires_grad))
    if torch.is_grad_enabled():
        first, second = Reversible.apply(updates, x.dtype, parameters, first, second, source, *parameters)
    else:
        for update in updates:
            first, second = second, first + update.run(second.to(x.dtype), source)
    return ((first + second) / 2).to(x.dtype)


class Reversible(torch.autograd.Function):
    """The updates of two streams. Random draws are the same in the second computation, and autocast is the same."""

    @staticmethod
    def forward(ctx, updates, dtype, parameters, first, second, source, *unused):
        ctx.random = []
        for update in updates:
            ctx.random.append(utils.get_rng_state())
            first, second = second, first + update.run(second.to(dtype), source)
        ctx.updates, ctx.dtype, ctx.parameters = updates, dtype, parameters
        kind = first.device.type
        ctx.autocast = {"device_type": kind, "enabled": torch.is_autocast_enabled(kind), "dtype": torch.get_autocast_dtype(kind)}
        ctx.save_for_backward(first, second, source)
        return first, second

    @staticmethod
    @once_differentiable
    def backward(ctx, d_first, d_second):
        first, second, source = ctx.saved_tensors
        d_source, gradients = None, dict.fromkeys(ctx.parameters)
        after = utils.get_rng_state()
        for update, random in zip(reversed(ctx.updates), reversed(ctx.random)):
            first, second, d_first, d_second = second, first, d_second, d_first
            # here: first = what it was + update(second)
            read, other = second.detach().requires_grad_(), None if source is None else source.detach().requires_grad_()
            utils.set_rng_state(random)
            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                added = update.run(read.to(ctx.dtype), other)
            own = [p for p in update.parameters if p.requires_grad]
            wanted = [read, *([] if other is None else [other]), *own]
            found = torch.autograd.grad(added, wanted, d_first.to(added.dtype), allow_unused=True)
            first = first - added.detach()
            d_second = add(d_second, found[0])
            if other is not None:
                d_source = add(d_source, found[1])
            for p, gradient in zip(own, found[len(wanted) - len(own) :]):
                gradients[p] = add(gradients[p], gradient)
        utils.set_rng_state(after)
        return None, None, None, d_first, d_second, d_source, *gradients.values()


def add(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    """The sum; None stands for 0."""
    return total if more is None else more if total is None else total + more
