"""RWKV's feed-forward layer, which mixes each token with the one before it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...ops.state import tensor_state
from .convolution import EarlierTokens


@tensor_state
class LastToken(NamedTuple):
    """What channel mixing read last."""

    vectors: Tensor  # (B,1,C), 0 before the first token


class ChannelMixing(nn.Module):
    """RWKV's feed-forward layer: W_v relu(W_k m_k)^2, in RWKV 6 times sigmoid(W_r m_r). Each m is a learnt mixture of a token and
    the one before it, x_t + mu * (x_{t-1} - x_t).

    ``depth``: from 1 for the first layer to almost 0 for the last. W_v and W_r start at 0.
    """

    def __init__(self, width: int, units: int, receptance: bool, depth: float, dropout: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        share = torch.arange(width) / width
        start = 1 - share ** (depth if receptance else depth**4)
        self.mixture, self.key = nn.Parameter(start), nn.Linear(width, units, bias=False)
        self.value = nn.Linear(units, width, bias=False)
        self.dropout = dropout
        self.receptance = nn.Linear(width, width, bias=False) if receptance else None
        self.receptance_mixture: Any = nn.Parameter(start.clone()) if receptance else None
        nn.init.xavier_uniform_(self.key.weight)
        for zero in filter(None, (self.value, self.receptance)):
            nn.init.zeros_(zero.weight)

    def forward(
        self, x: Tensor, state: LastToken | None = None, padding_mask: Tensor | None = None, reset_mask: Tensor | None = None
    ) -> tuple[Tensor, LastToken]:
        """Maps x (T,B,C) to (T,B,C) and the state after the last token."""
        earlier = EarlierTokens(x, None if state is None else state.vectors, 1, padding_mask, reset_mask)
        return self.of_pair(x, earlier.in_place(earlier.back(1))), LastToken(earlier.recent())

    def of_pair(self, x: Tensor, before: Tensor) -> Tensor:
        """Maps tokens and those before them, (...,C), to (...,C)."""
        change = before - x
        y = self.value(self.dropout(F.relu(self.key(torch.addcmul(x, change, self.mixture))).square()))
        if self.receptance is None:
            return y
        return torch.sigmoid(self.receptance(torch.addcmul(x, change, self.receptance_mixture))) * y
