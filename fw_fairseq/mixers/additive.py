"""Additive attention: two rounds of pooling, with one weight per token and head, over all of the past or a window of it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..feature_maps import wide
from ..ops.scans.pooling import PoolState, last_weights, pool
from ..ops.state import tensor_state
from .base import rows
from .pooled import Pooled


@tensor_state
class PooledState(NamedTuple):
    """The states of the two rounds of pooling: first the fields that both have without a window, then all others."""

    query_scores: Tensor
    query_values: Tensor
    key_scores: Tensor
    key_values: Tensor
    query_front: Tensor | None = None
    query_middle: Tensor | None = None
    query_ready: Tensor | None = None
    query_back: Tensor | None = None
    query_recent: Tensor | None = None
    query_used: Tensor | None = None
    key_front: Tensor | None = None
    key_middle: Tensor | None = None
    key_ready: Tensor | None = None
    key_back: Tensor | None = None
    key_recent: Tensor | None = None
    key_used: Tensor | None = None

    @classmethod
    def of_rounds(cls, queries: PoolState, keys: PoolState) -> PooledState:
        return cls(*queries[:2], *keys[:2], *queries[2:], *keys[2:])

    def rounds(self) -> tuple[PoolState, PoolState]:
        return PoolState(*self[:2], *self[4:10]), PoolState(*self[2:4], *self[10:])


class Additive(Pooled):
    """q' = pool(q); p = LayerNorm(x + q' k); p' = pool(p); y = W (p' v). The residual and the norm inside make training stable.

    ``--pooling-form published``: q' = W pool(q), scores that are 0 at the start, and y = q' k + p' v, which is added to x.
    """

    state_type, parts, poolings = PooledState, 3, 2

    def __init__(self, embed_dim: int, heads: int = 1, config: Any = None, window: int = 0, **given) -> None:
        super().__init__(embed_dim, heads, config, window, **given)
        self.norms_residual = self.published
        self.query_score = nn.Parameter(torch.empty(heads, self.head_dim))
        self.key_score = nn.Parameter(torch.empty(heads, self.head_dim))
        self.norm = nn.LayerNorm(embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the projections as fairseq's attention does, and the weights of the scores from a normal distribution."""
        super().reset_parameters()
        for weight in (self.query_score, self.key_score):
            nn.init.zeros_(weight) if self.published else nn.init.normal_(weight)

    def forward(
        self,
        x: Tensor,
        state: PooledState | None = None,
        padding_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
        *,
        source: Tensor | None = None,
        keep_state: bool = True,
        **unused,
    ) -> tuple[Tensor, PooledState | None]:
        queries, keys = (None, None) if state is None else state.rounds()
        given: Any = {"padding_mask": padding_mask, "reset_mask": reset_mask, "keep_state": keep_state}
        q, k, v = self.in_proj(x if source is None else source).chunk(3, -1)
        q = self.by_head(q)
        pooled, queries = pool(self.scores(q, self.query_score), q, self.window, queries, **given)
        mixed = self.mixed(pooled, k)
        p = self.by_head(self.norm(x + mixed))
        pooled, keys = pool(self.scores(p, self.key_score), p, self.window, keys, **given)
        y = self.dropout(self.join(pooled)) * v
        return mixed + y if self.published else self.out_proj(
            y
        ), None if queries is None or keys is None else PooledState.of_rounds(queries, keys)

    def mixed(self, pooled: Tensor, k: Tensor) -> Tensor:
        """Maps the pooled queries (B,H,T,X) and the keys (T,B,C) to q' k, (T,B,C)."""
        pooled = self.dropout(self.join(pooled))
        return (self.out_proj(pooled) if self.published else pooled) * k

    def projections(self) -> dict[str, dict[str, slice]]:
        return {"in_proj": rows(q=self.embed_dim, k=self.embed_dim, v=self.embed_dim)}

    def explain(self, x: Tensor) -> dict[str, Tensor]:
        q, k, _ = self.in_proj(x).chunk(3, -1)
        q = self.by_head(q)
        queries = self.scores(q, self.query_score)
        p = self.by_head(self.norm(x + self.mixed(pool(queries, q, self.window)[0], k)))
        keys = self.scores(p, self.key_score)
        return {"query pooling": last_weights(queries, self.window)[0], "key pooling": last_weights(keys, self.window)[0]}

    def scores(self, x: Tensor, weight: Tensor) -> Tensor:
        """Maps (B,H,T,X) to scores (B,H,T), in fp32 because they are exponents."""
        return self.scaled_product(wide(x), wide(weight)[:, None])
