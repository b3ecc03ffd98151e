"""A norm of what each head reads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...feature_maps import wide

EPS = 1e-5


class HeadNorm(nn.Module):
    """The reads of each head times ``scale``, divided by their root mean square, times learnt weights, which all heads share."""

    def __init__(self, width: int, scale: float = 1.0):
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, y: Tensor) -> Tensor:
        """Maps (...,V) to (...,V)."""
        x = wide(y) if self.scale == 1 else wide(y) * self.scale
        return (x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.weight).to(y.dtype)
