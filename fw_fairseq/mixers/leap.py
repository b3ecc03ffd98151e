"""LEAP, the later form of additive attention: a sigmoid reads the weighted means of keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..feature_maps import wide
from ..ops.scans.pooling import PoolState, last_weights, pool
from .base import rows
from .pooled import Pooled


class Leap(Pooled):
    """w = elu(f k / sqrt(d)) + 1; k', v' = means of k and v weighted by w, over all of the past or a window;
    y = W (sigmoid(q k' / sqrt(d)) v').

    ``--pooling-form published`` has no W. ``--pooling-dropout`` is that of q, f, v and f k / sqrt(d).
    """

    state_type, parts, poolings = PoolState, 4, 1

    def __init__(self, embed_dim: int, heads: int = 1, config: Any = None, window: int = 0, **given) -> None:
        super().__init__(embed_dim, heads, config, window, **given)
        self.out_proj = None if self.published else nn.Linear(embed_dim, embed_dim, bias=False)
        self.reset_parameters()

    def forward(
        self,
        x: Tensor,
        state: PoolState | None = None,
        padding_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
        *,
        source: Tensor | None = None,
        keep_state: bool = True,
        **unused,
    ) -> tuple[Tensor, PoolState | None]:
        q, f, k, v = map(self.by_head, self.in_proj(x if source is None else source).chunk(4, -1))
        q, f, v = self.dropout(q), self.dropout(f), self.dropout(v)
        scores = self.scores(f, k)
        focused, state = pool(scores, torch.cat([k, v], -1), self.window, state, padding_mask, reset_mask, keep_state=keep_state)
        k, v = focused.chunk(2, -1)
        read = torch.sigmoid(self.scaled_product(wide(q), wide(k))).to(v.dtype)
        y = self.join(read[..., None] * v)
        return y if self.out_proj is None else self.out_proj(y), state

    def projections(self) -> dict[str, dict[str, slice]]:
        return {"in_proj": rows(q=self.embed_dim, f=self.embed_dim, k=self.embed_dim, v=self.embed_dim)}

    def scores(self, f: Tensor, k: Tensor) -> Tensor:
        """Returns log w of each token, (B,H,T)."""
        return log_focus(self.dropout(self.scaled_product(wide(f), wide(k))))

    def explain(self, x: Tensor) -> dict[str, Tensor]:
        _, f, k, _ = map(self.by_head, self.in_proj(x).chunk(4, -1))
        return {"focus": last_weights(self.scores(f, k), self.window)[0]}


def log_focus(x: Tensor) -> Tensor:
    """Returns log(elu(x) + 1)."""
    return torch.where(x > 0, torch.log1p(F.relu(x)), x)
