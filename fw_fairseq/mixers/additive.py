"""Additive attention: two rounds of pooling, with one weight per token and head, over all of the past or a window of it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..feature_maps import wide
from ..ops.state import tensor_state
from ..ops.vectors.pooling import PoolState, last_weights, pool
from .base import Mixer, rows
from .pooled import layer_window


@tensor_state
class PooledState(NamedTuple):
    """The states of the two rounds of pooling."""

    query_scores: Tensor
    query_values: Tensor
    key_scores: Tensor
    key_values: Tensor


class Additive(Mixer):
    """q' = pool(q); p = LayerNorm(x + q' k); p' = pool(p); y = W (p' v). The residual and the norm inside make training stable."""

    state_type, options = PooledState, ("window_sizes",)

    def __init__(self, embed_dim: int, num_heads: int, config, window: int = 0):
        super().__init__(embed_dim, num_heads)
        self.window = window
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim, bias=False)
        self.query_score = nn.Parameter(torch.empty(num_heads, self.head_dim))
        self.key_score = nn.Parameter(torch.empty(num_heads, self.head_dim))
        self.norm = nn.LayerNorm(embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.reset_parameters()

    @classmethod
    def of_layer(cls, embed_dim, num_heads, config, layer, layers):
        """Returns the mixer of one layer, with the window of that layer."""
        return cls(embed_dim, num_heads, config, layer_window(config, layer, layers))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the projections as fairseq's attention does, and the weights of the scores from a normal distribution."""
        for weight in self.in_proj.weight.chunk(3):
            nn.init.xavier_uniform_(weight, gain=1 / math.sqrt(2))
        for weight in (self.query_score, self.key_score):
            nn.init.normal_(weight)
        nn.init.xavier_uniform_(self.out_proj.weight)

    def forward(self, x: Tensor, state: PooledState | None = None, padding_mask=None, reset_mask=None, **unused):
        """Maps x (T,B,C) to y (T,B,C) and the state after the last token."""
        queries, keys = (None, None) if state is None else (PoolState(*state[:2]), PoolState(*state[2:]))
        q, k, v = self.in_proj(x).chunk(3, -1)
        q = self.by_head(q)
        pooled, queries = pool(self.scores(q, self.query_score), q, self.window, queries, padding_mask, reset_mask)
        p = self.by_head(self.norm(x + self.join(pooled) * k))
        pooled, keys = pool(self.scores(p, self.key_score), p, self.window, keys, padding_mask, reset_mask)
        return self.out_proj(self.join(pooled) * v), PooledState(*queries, *keys)

    def projections(self) -> dict[str, dict[str, slice]]:
        """Maps the input projection to the rows of each of its parts."""
        return {"in_proj": rows(q=self.embed_dim, k=self.embed_dim, v=self.embed_dim)}

    def explain(self, x: Tensor) -> dict[str, Tensor]:
        """Returns the weights of the tokens in both rounds of pooling, at the last token."""
        q, k, _ = self.in_proj(x).chunk(3, -1)
        q = self.by_head(q)
        queries = self.scores(q, self.query_score)
        p = self.by_head(self.norm(x + self.join(pool(queries, q, self.window)[0]) * k))
        keys = self.scores(p, self.key_score)
        return {"query pooling": last_weights(queries, self.window)[0], "key pooling": last_weights(keys, self.window)[0]}

    def scores(self, x: Tensor, weight: Tensor) -> Tensor:
        """Maps (B,H,T,X) to scores (B,H,T), in fp32 because they are exponents."""
        return (wide(x) * wide(weight)[:, None]).sum(-1) * self.head_dim**-0.5
