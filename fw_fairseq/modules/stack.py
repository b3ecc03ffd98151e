"""All layers of an encoder or a decoder as one, where they share more than a residual stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from .sparse import Update, run_updates


class Stack(nn.ModuleList):
    """The layers of an encoder or a decoder, which fairseq's loop over them calls as one: iteration gives this module alone.

    ``children()`` has the layers. ``drop``: the probability that training leaves a layer out. ``reversible``: the layers have two
    residual streams. ``in_front``: the encoder's output stands before the target, and there is no cross attention.
    """

    def __init__(self, layers: Sequence[nn.Module], drop: float, reversible: bool, in_front: bool = False):
        super().__init__(layers)
        self.drop, self.reversible, self.in_front = drop, reversible, in_front

    def __iter__(self) -> Iterator[nn.Module]:
        yield self

    __repr__ = nn.Module.__repr__

    def kept(self) -> list[nn.Module]:
        """The layers that this pass uses."""
        layers = list(self.children())
        if not self.training or not self.drop:
            return layers
        return [layer for layer, drawn in zip(layers, torch.empty(len(layers)).uniform_()) if drawn > self.drop]

    def forward(self, x: Tensor, *args, **kwargs):
        """Calls all layers as fairseq calls one of them."""
        return self.with_source(x, *args, **kwargs) if self.in_front else self.run(x, *args, **kwargs)

    def run(self, x: Tensor, *args, **kwargs):
        """Runs the layers one after the other."""
        first, *_ = self.children()
        if not self.reversible:
            for layer in self.kept():
                x, *_ = layer(x, *args, **kwargs)
            return x, None, None
        call = first.call_of(*args, **kwargs)
        updates = [Update(run, [*layer.parameters()]) for layer in self.kept() for run in layer.updates(call)]
        return first.returned(run_updates(updates, x, call.source), call)

    def with_source(
        self, x: Tensor, source: Tensor, source_padding: Tensor | None, incremental_state: dict | None, *,
        self_attn_mask: Tensor | None = None, self_attn_padding_mask: Tensor | None = None, **others,
    ):  # fmt: skip
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
