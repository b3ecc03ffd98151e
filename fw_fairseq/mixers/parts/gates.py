"""Gates as published layers make them: constants, low ranks, nonlinearities, and gates made of others."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...feature_maps import wide
from ...rules import Gate
from ...rules.gates import FORMS, INNER, Place, left, log_rates
from .features import initial_bias


def start_low_rank(up: Tensor, still: bool) -> None:
    """Draws the map from a low rank to a gate. ``still``: the numbers of the rank start at 0, and the map is a tenth of an
    orthogonal one (RWKV 7)."""
    if not still:
        nn.init.xavier_uniform_(up, gain=2**-0.5)
    else:
        nn.init.orthogonal_(up, gain=0.1 * max(1.0, up.shape[1] / up.shape[0]) ** 0.5)


class GateMaker(nn.Module):
    """Makes one gate of a rule (``rules.Gate``), of ``place.size`` numbers over all heads.

    ``size`` says how many rows of the layer's projection it needs. ``bias`` is what ``Gate.bias`` starts: the gate itself where it
    is constant, the factors of a gate made of the key, the bound of a bounded form, else what is added before the form.
    """

    def __init__(self, gate: Gate, place: Place, head_dim: int) -> None:
        super().__init__()
        self.form, self.inner, self.of, self.constant = gate.form, gate.inner, gate.of, gate.constant
        self.heads, self.scalar = place.heads, gate.axis is None
        form, rank = FORMS[gate.form], head_dim if isinstance(gate.rank, str) else gate.rank
        self.size = 0 if gate.of or gate.constant else rank or place.size
        self.up = None if rank is None else nn.Parameter(torch.empty(place.size, rank))
        self.rate: Any = nn.Parameter(log_rates(place.heads, gate.rates)) if form.rate else None
        self.fixed: Any = functools.partial(gate.bias, place) if callable(gate.bias) and not gate.learnt else None
        self.bias: Any = None
        if gate.learnt and (gate.bias is not None or gate.of is None):
            self.bias = nn.Parameter(initial_bias(gate, place))
        if self.up is not None:
            start_low_rank(self.up, gate.still)

    def fixed_as(self, source: Tensor) -> Tensor:
        """Returns the constant beside ``source``, but in fp32 at least: in 16 bits RetNet's gates near 1 would be 1."""
        return self.fixed().to(source.device, torch.promote_types(source.dtype, torch.float32))

    def forward(self, source: Tensor) -> Tensor:
        """Maps the rows of the projection (T,B,size), or the gate or the key that it is made of, to (B,H,T) or (B,H,T,X)."""
        form = FORMS[self.form]
        if self.constant:
            bias = self.bias if self.fixed is None else self.fixed_as(source)
            x = self.by_head(bias).expand(source.shape[1], -1, source.shape[0], -1)
        elif self.of is not None:
            x = wide(source if source.dim() == 4 else source.unsqueeze(-1))
            x = x if self.bias is None else x * self.by_head(self.bias)
        else:
            x = INNER[self.inner](source)
            x = wide(x if self.up is None else F.linear(x, self.up)).unflatten(-1, (self.heads, -1)).permute(1, 2, 0, 3)
            x = x if form.bound else x + self.by_head(self.bias)
        x = form.function(x)
        if form.rate:
            x = self.rate.exp().view(-1, 1, 1) * x
            x = x if form.exponent else left(x)
        if form.bound:
            bound = self.by_head(self.bias).sigmoid()
            x = bound + (1 - bound) * x
        return x.squeeze(-1) if self.scalar else x

    def by_head(self, x: Tensor) -> Tensor:
        """(H*X) -> (H,1,X)"""
        return wide(x).view(self.heads, 1, -1)
