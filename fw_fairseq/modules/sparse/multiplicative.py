"""The multiplicative dense layer of Jaszczur et al. 2021, and the sparse loss that is made of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...ops.sparse import gained


class Multiplicative(nn.Module):
    """y[n] = (x * G[n]) P for n = 1..M, side by side, plus a bias: M I + I O/M + O weights in place of I O.

    Where M does not divide O, the last module has outputs that are left out.
    """

    def __init__(self, in_features: int, out_features: int, count: int):
        super().__init__()
        self.in_features, self.out_features, self.count = in_features, out_features, count
        self.gains = nn.Parameter(torch.empty(count, in_features))  # G
        self.weight = nn.Parameter(torch.empty(-(-out_features // count), in_features))  # P^T
        self.bias = nn.Parameter(torch.empty(out_features))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the weights as published."""
        nn.init.normal_(self.gains, std=0.5)
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (...,I) to (...,O)."""
        return gained(x, self.gains, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, count={self.count}"
