"""The simple recurrent unit beside a feed-forward layer: 32 units that order the tokens of a model without positions."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...mixers.sru import SruState
from ...ops.scans.sru import sru

HIGHWAY = math.sqrt(3)


class RecurrentUnits(nn.Module):
    """W_o SRU(W_i LN(x)) with few units, whose gates read the token alone: f_t = sigmoid(F_t), r_t = sigmoid(R_t),
    c_t = f_t c_{t-1} + (1 - f_t) u_t, h_t = r_t c_t + (1 - r_t) sqrt(3) x_t."""

    def __init__(self, width: int, units: int):
        super().__init__()
        self.units = units
        self.norm = nn.LayerNorm(width)
        self.down, self.gates, self.up = nn.Linear(width, units), nn.Linear(units, 3 * units), nn.Linear(units, width)
        for linear in (self.down, self.gates, self.up):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(
        self, x: Tensor, state: SruState | None = None, padding_mask: Tensor | None = None, reset_mask: Tensor | None = None
    ) -> tuple[Tensor, SruState]:
        """Maps x (T,B,C) to (T,B,C) and the state after the last token."""
        inner = self.down(self.norm(x))
        alone = inner.new_zeros(self.units)
        cell = None if state is None else state.cell
        h, cell = sru(self.gates(inner), inner, alone, alone, cell, padding_mask, reset_mask, HIGHWAY)
        return self.up(h), SruState(cell)

    def step(self, x: Tensor, cell: Tensor) -> Tensor:
        """Maps one token x (R,C) to (R,C), and changes ``cell`` (R,units) in place."""
        inner = self.down(self.norm(x))
        u, forget, highway = self.gates(inner).to(cell.dtype).chunk(3, -1)
        torch.lerp(u, cell, forget.sigmoid(), out=cell)
        return self.up(torch.lerp(inner.to(cell.dtype) * HIGHWAY, cell, highway.sigmoid()).to(x.dtype))
