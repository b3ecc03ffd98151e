"""Reversible residual connections: a backward computes each layer's input from its output, so that no layer keeps activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

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
    def forward(
        ctx: Any,
        updates: Sequence[Update],
        dtype: torch.dtype,
        parameters: list[nn.Parameter],
        first: Tensor,
        second: Tensor,
        source: Tensor | None,
        *unused,
    ) -> tuple[Tensor, Tensor]:
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
    def backward(ctx: Any, d_first: Any, d_second: Any) -> tuple:
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


class Stack(nn.ModuleList):
    """The layers of an encoder or a decoder, which fairseq's loop over them calls as one: iteration gives this module alone.

    ``children()`` has the layers. ``drop``: the probability that training leaves a layer out. ``reversible``: the layers have two
    residual streams. ``in_front``: the encoder's output stands before the target, and there is no cross attention.
    """

    def __init__(self, layers: Sequence[nn.Module], drop: float, reversible: bool, in_front: bool = False) -> None:
        super().__init__(layers)
        self.drop, self.reversible, self.in_front = drop, reversible, in_front

    def __iter__(self) -> Iterator[nn.Module]:
        yield self

    __repr__ = nn.Module.__repr__

    def kept(self) -> list[Any]:
        """The layers that this pass uses."""
        layers = list(self.children())
        if not self.training or not self.drop:
            return layers
        return [layer for layer, drawn in zip(layers, torch.empty(len(layers)).uniform_()) if drawn > self.drop]

    def forward(self, x: Tensor, *args, **kwargs) -> Any:
        """Calls all layers as fairseq calls one of them."""
        return self.with_source(x, *args, **kwargs) if self.in_front else self.run(x, *args, **kwargs)

    def run(self, x: Tensor, *args, **kwargs) -> Any:
        """Runs the layers one after the other."""
        first: Any = next(self.children())
        if not self.reversible:
            for layer in self.kept():
                y = layer(x, *args, **kwargs)  # of an encoder's layer a tensor
                x = y if isinstance(y, Tensor) else y[0]
            return first.returned(x, first.call_of())
        call = first.call_of(*args, **kwargs)
        updates = [Update(run, [*layer.parameters()]) for layer in self.kept() for run, _ in layer.parts(call)]
        return first.returned(run_updates(updates, x, call.source), call)

    def with_source(
        self, x: Tensor, source: Tensor, source_padding: Tensor | None, incremental_state: dict | None, *,
        self_attn_mask: Tensor | None = None, self_attn_padding_mask: Tensor | None = None, **others,
    ) -> tuple:  # fmt: skip
        """Runs the layers on the source (S,B,C) and the target x (T,B,C), and returns the outputs at the target. While decoding,
        the first call reads the source."""
        masks = {"self_attn_mask": self_attn_mask, "self_attn_padding_mask": self_attn_padding_mask}
        if incremental_state:
            return self.run(x, None, None, incremental_state, **masks, **others)
        both, padding, places = joined(source, x, source_padding, self_attn_padding_mask)
        mask = torch.full((len(both), len(both)), -torch.inf, dtype=x.dtype, device=x.device).triu(1)
        masks = {"self_attn_mask": mask, "self_attn_padding_mask": padding}
        y, *rest = self.run(both, None, None, incremental_state, **masks, **others)
        return y.gather(0, places[..., None].expand(-1, -1, y.shape[2])), *rest


def joined(source: Tensor, x: Tensor, source_padding: Tensor | None, padding: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Puts each source (S,B,C) in front of its target x (T,B,C) without the padding between: all padding comes last.

    Returns both (S+T,B,C), their padding (B,S+T), and the places of the target in them, (T,B).
    """
    none = x.new_zeros(x.shape[1], 1, dtype=torch.bool)
    source_padding = none.expand(-1, len(source)) if source_padding is None else source_padding
    hidden = torch.cat([source_padding, none.expand(-1, len(x)) if padding is None else padding], 1)
    order = hidden.long().argsort(dim=1, stable=True)
    both = torch.cat([source, x]).gather(0, order.t()[..., None].expand(-1, -1, x.shape[2]))
    return both, hidden.gather(1, order), order.argsort(dim=1).t()[len(source) :]
