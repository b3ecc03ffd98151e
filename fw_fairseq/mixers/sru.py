"""Simple recurrent units: one matrix product for all tokens, then an elementwise recurrence."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..feature_maps import wide
from ..ops.onednn import Linear
from ..ops.recall import until_end
from ..ops.state import tensor_state
from ..ops.vectors.sru import sru
from .base import Mixer, rows


@tensor_state
class SruState(NamedTuple):
    """The cell after the last token."""

    cell: Tensor  # (B,C), fp32 (float64 for float64 inputs)


class Sru(Mixer):
    """A recurrence whose gates read the cell before, and a highway: h = r c + (1 - r) x scale.

    --sru-projection makes the product one of two factors. The weights start as published: they keep the variance of the
    input, the gates' weights half of it, and ``scale`` keeps it through the highway.
    """

    state_type, options = SruState, ("sru_projection", "sru_highway_bias")

    def __init__(self, embed_dim: int, num_heads: int, config):
        super().__init__(embed_dim, num_heads)
        width = config.sru_projection or embed_dim
        self.prepare(width, config.sru_highway_bias)
        self.down_proj = Linear(embed_dim, width, bias=False) if config.sru_projection else None
        self.reset_parameters()

    def prepare(self, width: int, highway_bias: float) -> None:
        """Creates the parameters of the recurrence. Its product reads inputs of size ``width``."""
        self.highway_bias, self.scale = highway_bias, math.sqrt(1 + 2 * math.exp(highway_bias))
        self.in_proj = Linear(width, 3 * self.embed_dim)
        self.gate_weight = nn.Parameter(torch.empty(2, self.embed_dim))  # v_f, v_r

    def linears(self) -> list[nn.Linear]:
        """Returns the linear layers, in the order of their use."""
        return [self.in_proj] if self.down_proj is None else [self.down_proj, self.in_proj]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the weights as published."""
        for layer in self.linears():
            bound = math.sqrt(3 / layer.in_features)
            nn.init.uniform_(layer.weight, -bound, bound)
        self.in_proj.weight[self.embed_dim :] *= math.sqrt(0.5)
        nn.init.uniform_(self.gate_weight, -math.sqrt(1.5), math.sqrt(1.5))
        nn.init.zeros_(self.in_proj.bias)
        self.in_proj.bias[2 * self.embed_dim :] = self.highway_bias

    def forward(self, x: Tensor, state: SruState | None = None, padding_mask=None, reset_mask=None, **unused):
        """Maps x (T,B,C) to h (T,B,C) and the state after the last token."""
        inner = x if self.down_proj is None else self.down_proj(x)
        return self.recur(inner, x, None if state is None else state.cell, padding_mask, reset_mask)

    def projections(self) -> dict[str, dict[str, slice]]:
        """Maps the input projection to the rows of each of its parts."""
        width = self.embed_dim
        return {"in_proj": rows(**{"input": width, "forget gate": width, "highway gate": width})}

    def explain(self, x: Tensor) -> dict[str, Tensor]:
        """Returns the weights of the tokens in the last cell."""
        return self.explain_memory(x if self.down_proj is None else self.down_proj(x))

    def explain_memory(self, inner: Tensor) -> dict[str, Tensor]:
        """Returns, for each token, the mean over the units of its factor in the last cell, and of 1 - f_t. The last cell is the sum
        of (1 - f_t) u_t times all later f."""
        u, forget, _ = wide(self.in_proj(inner)).chunk(3, -1)
        c, gates = torch.zeros_like(u[0]), []
        for u_t, forget_t in zip(u, forget):
            gates.append(torch.sigmoid(forget_t + self.gate_weight[0] * c))
            c = torch.lerp(u_t, c, gates[-1])
        f = torch.stack(gates).transpose(0, 1)  # (1,T,C)
        left = until_end(f[:, None])[:, 0].exp()
        return {"memory": ((1 - f) * left).mean(-1), "write": (1 - f).mean(-1)}

    def recur(self, inner: Tensor, x: Tensor, cell: Tensor | None, padding_mask, reset_mask):
        """Returns h and the state. The product reads inner (T,B,width), and the highway passes x (T,B,C)."""
        h, cell = sru(self.in_proj(inner), x, *self.gate_weight, cell, padding_mask, reset_mask, self.scale)
        return h, SruState(cell)
