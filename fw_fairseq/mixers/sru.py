"""Simple recurrent units: one product for all of time, then an elementwise recurrence."""

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
    cell: Tensor  # (B,C), fp32 (float64 for float64 inputs)


class Sru(Mixer):
    """Gates that read the state before, and a highway: h = r c + (1 - r) x scale. --sru-projection: a product of two factors.

    Weights begin as published: variances are those of the input, the gates' halved; ``scale`` keeps them through the highway.
    """

    state_type = SruState

    def __init__(self, embed_dim: int, num_heads: int, config):
        super().__init__(embed_dim, num_heads)
        width = config.sru_projection or embed_dim
        self.prepare(width, config.sru_highway_bias)
        self.down_proj = Linear(embed_dim, width, bias=False) if config.sru_projection else None
        self.reset_parameters()

    def prepare(self, width: int, highway_bias: float) -> None:
        """The recurrence, whose product reads ``width``."""
        self.highway_bias, self.scale = highway_bias, math.sqrt(1 + 2 * math.exp(highway_bias))
        self.in_proj = Linear(width, 3 * self.embed_dim)
        self.gate_weight = nn.Parameter(torch.empty(2, self.embed_dim))  # v_f, v_r

    def linears(self) -> list[nn.Linear]:
        return [self.in_proj] if self.down_proj is None else [self.down_proj, self.in_proj]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for layer in self.linears():
            bound = math.sqrt(3 / layer.in_features)
            nn.init.uniform_(layer.weight, -bound, bound)
        self.in_proj.weight[self.embed_dim :] *= math.sqrt(0.5)
        nn.init.uniform_(self.gate_weight, -math.sqrt(1.5), math.sqrt(1.5))
        nn.init.zeros_(self.in_proj.bias)
        self.in_proj.bias[2 * self.embed_dim :] = self.highway_bias

    def forward(self, x: Tensor, state: SruState | None = None, padding_mask=None, reset_mask=None, **unused):
        inner = x if self.down_proj is None else self.down_proj(x)
        return self.recur(inner, x, None if state is None else state.cell, padding_mask, reset_mask)

    def projections(self) -> dict[str, dict[str, slice]]:
        width = self.embed_dim
        return {"in_proj": rows(**{"input": width, "forget gate": width, "highway gate": width})}

    def explain(self, x: Tensor) -> dict[str, Tensor]:
        return self.explain_memory(x if self.down_proj is None else self.down_proj(x))

    def explain_memory(self, inner: Tensor) -> dict[str, Tensor]:
        """The last c is the sum of (1 - f_t) u_t times all later f: the mean of that factor over the units, and of 1 - f_t."""
        u, forget, _ = wide(self.in_proj(inner)).chunk(3, -1)
        c, gates = torch.zeros_like(u[0]), []
        for u_t, forget_t in zip(u, forget):
            gates.append(torch.sigmoid(forget_t + self.gate_weight[0] * c))
            c = torch.lerp(u_t, c, gates[-1])
        f = torch.stack(gates).transpose(0, 1)  # (1,T,C)
        left = until_end(f[:, None])[:, 0].exp()
        return {"memory": ((1 - f) * left).mean(-1), "write": (1 - f).mean(-1)}

    def recur(self, inner: Tensor, x: Tensor, cell: Tensor | None, padding_mask, reset_mask):
        """inner (T,B,width) goes through the product, x (T,B,C) over the highway."""
        h, cell = sru(self.in_proj(inner), x, *self.gate_weight, cell, padding_mask, reset_mask, self.scale)
        return h, SruState(cell)
