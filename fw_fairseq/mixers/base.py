"""The one state protocol of every token mixer."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def check_heads(embed_dim: int, num_heads: int) -> None:
    if num_heads < 1 or embed_dim % num_heads:
        raise ValueError(f"--decoder-embed-dim is {embed_dim}; it must be a multiple of --decoder-attention-heads, {num_heads}")


class Mixer(nn.Module):
    """``forward(x[0:T])`` equals ``forward(x[0:s])`` then ``forward(x[s:T], state)`` for every s, to rounding.

    The same state serves one-token decoding, carrying the memory over segments, and taking a prompt in one pass. It has
    ``index_select(order)`` along the batch and ``detach()``; its size does not depend on how many tokens were seen.
    """

    state_type: type  # of ``ops.state``

    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__()
        check_heads(embed_dim, num_heads)
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.watched, self.keeps_state_norm = False, False  # see ``watch``
        self.state_norm: Tensor | None = None  # of fast weights, with its gradient
        self.decoding = False  # set where the tokens come one at a time: a state may then be kept in whatever form is smaller
        self.group = None  # of torch.distributed: set where its workers hold consecutive parts of the tokens
        self.last_statistics: dict[str, Tensor | None] = {}

    @classmethod
    def of_layer(cls, embed_dim: int, num_heads: int, config, layer: int, layers: int) -> Mixer:
        """The mixer of layer number ``layer`` of ``layers``; ``config`` is a FastWeightConfig."""
        return cls(embed_dim, num_heads, config)

    def forward(self, x: Tensor, state=None, padding_mask: Tensor | None = None, reset_mask: Tensor | None = None):
        """x (T,B,C) -> y (T,B,C), state. padding_mask (B,T): True at padding; reset_mask (B,T): True where a new text begins."""
        raise NotImplementedError

    def explain(self, x: Tensor) -> dict[str, Tensor]:
        """x (T,1,C) -> the weights (heads,T) that the tokens have in what the last one gets, by what they are: docs/explain.md."""
        raise ValueError(f"fw-explain cannot say what a layer of {type(self).__name__} takes from which token")

    def by_head(self, part: Tensor) -> Tensor:
        """(T,B,H*X) -> (B,H,T,X), a view."""
        return part.unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0, 3)

    def join(self, heads: Tensor) -> Tensor:
        """(B,H,T,X) -> (T,B,H*X)"""
        return heads.permute(2, 0, 1, 3).flatten(2)

    @torch.no_grad()
    def state_size(self) -> int:
        """How many numbers it keeps of a sequence."""
        _, state = self(next(self.parameters()).new_zeros(1, 1, self.embed_dim))
        return sum(x.numel() for x in state if x is not None and x.is_floating_point())

    def pretrained(self) -> dict[str, slice]:
        """The rows of its parameters that fw-convert takes over from attention, as they are or scaled."""
        return {}

    def redraw(self, keep: bool = False) -> None:
        """Called before a forward: new random features for training, or with ``keep`` those that an earlier state was made with."""

    def why_not_across_workers(self) -> str | None:
        """Why it can't go on from the memory of the worker before it, in ``group``; None if it can."""
        return f"the memory of {type(self).__name__} does not pass from worker to worker; use --mixer fast_weight"

    def watch(self, keeps_state_norm: bool) -> None:
        """Before a training forward whose ``statistics`` are wanted, and ``state_norm`` if asked for."""
        self.watched, self.keeps_state_norm = True, keeps_state_norm
        self.last_statistics, self.state_norm = dict.fromkeys(self.last_statistics), None

    def statistics(self) -> dict[str, Tensor | None]:
        """Scalars of the forward after ``watch``, worth logging, detached; None if LayerDrop left it out."""
        return self.last_statistics
