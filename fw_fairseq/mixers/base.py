"""The one state protocol of every token mixer."""

from __future__ import annotations

from torch import Tensor, nn


class Mixer(nn.Module):
    """``forward(x[0:T])`` equals ``forward(x[0:s])`` then ``forward(x[s:T], state)`` for every s, to rounding.

    The same state serves one-token decoding, carrying the memory over segments, and taking a prompt in one pass. It has
    ``index_select(order)`` along the batch and ``detach()``; its size does not depend on how many tokens were seen.
    """

    state_type: type  # of ``ops.state``

    def __init__(self, embed_dim: int, num_heads: int):
        super().__init__()
        if embed_dim % num_heads:
            raise ValueError(f"--decoder-embed-dim is {embed_dim}; it must be a multiple of --decoder-attention-heads, {num_heads}")
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.state_norm: Tensor | None = None  # of fast weights, for a criterion that asks for it
        self.watched = False  # set by who wants ``statistics``
        self.decoding = False  # set where the tokens come one at a time: a state may then be kept in whatever form is smaller
        self.last_statistics: dict[str, Tensor] = {}

    @classmethod
    def of_layer(cls, embed_dim: int, num_heads: int, config, layer: int, layers: int) -> Mixer:
        """The mixer of layer number ``layer`` of ``layers``; ``config`` is a FastWeightConfig."""
        return cls(embed_dim, num_heads, config)

    def forward(self, x: Tensor, state=None, padding_mask: Tensor | None = None, reset_mask: Tensor | None = None):
        """x (T,B,C) -> y (T,B,C), state. padding_mask (B,T): True at padding; reset_mask (B,T): True where a new text begins."""
        raise NotImplementedError

    def by_head(self, part: Tensor) -> Tensor:
        """(T,B,H*X) -> (B,H,T,X), a view."""
        return part.unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0, 3)

    def redraw(self, keep: bool = False) -> None:
        """Called before a forward: new random features for training, or with ``keep`` those that an earlier state was made with."""

    def statistics(self) -> dict[str, Tensor]:
        """Scalars of the last training forward while ``watched``, worth logging, detached."""
        return self.last_statistics
