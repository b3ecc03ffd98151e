"""LEAP, the later form of additive attention: a sigmoid reads the weighted means of keys and values."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..feature_maps import wide
from ..ops.vectors.pooling import PoolState, last_weights, pool
from .base import Mixer, rows
from .pooled import layer_window


class Leap(Mixer):
    """w = elu(f k / sqrt(d)) + 1; k', v' = means of k and v weighted by w, over all of the past or a window;
    y = W (sigmoid(q k' / sqrt(d)) v')."""

    state_type, options = PoolState, ("window_sizes",)

    def __init__(self, embed_dim: int, num_heads: int, config, window: int = 0):
        super().__init__(embed_dim, num_heads)
        self.window = window
        self.in_proj = nn.Linear(embed_dim, 4 * embed_dim, bias=False)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.reset_parameters()

    @classmethod
    def of_layer(cls, embed_dim, num_heads, config, layer, layers):
        """Returns the mixer of one layer, with the window of that layer."""
        return cls(embed_dim, num_heads, config, layer_window(config, layer, layers))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the weights as fairseq's attention does."""
        for weight in self.in_proj.weight.chunk(4):
            nn.init.xavier_uniform_(weight, gain=1 / math.sqrt(2))
        nn.init.xavier_uniform_(self.out_proj.weight)

    def forward(self, x: Tensor, state: PoolState | None = None, padding_mask=None, reset_mask=None, **unused):
        """Maps x (T,B,C) to y (T,B,C) and the state after the last token."""
        q, f, k, v = map(self.by_head, self.in_proj(x).chunk(4, -1))
        scores = self.scores(f, k)
        focused, state = pool(scores, torch.cat([k, v], -1), self.window, state, padding_mask, reset_mask)
        k, v = focused.chunk(2, -1)
        read = torch.sigmoid((wide(q) * wide(k)).sum(-1, keepdim=True) * self.head_dim**-0.5).to(v.dtype)
        return self.out_proj(self.join(read * v)), state

    def projections(self) -> dict[str, dict[str, slice]]:
        """Maps the input projection to the rows of each of its parts."""
        return {"in_proj": rows(q=self.embed_dim, f=self.embed_dim, k=self.embed_dim, v=self.embed_dim)}

    def scores(self, f: Tensor, k: Tensor) -> Tensor:
        """Returns log w of each token, (B,H,T)."""
        return log_focus((wide(f) * wide(k)).sum(-1) * self.head_dim**-0.5)

    def explain(self, x: Tensor) -> dict[str, Tensor]:
        """Returns the weights of the tokens in the means at the last token."""
        _, f, k, _ = map(self.by_head, self.in_proj(x).chunk(4, -1))
        return {"focus": last_weights(self.scores(f, k), self.window)[0]}


def log_focus(x: Tensor) -> Tensor:
    """Returns log(elu(x) + 1)."""
    return torch.where(x > 0, torch.log1p(F.relu(x)), x)
