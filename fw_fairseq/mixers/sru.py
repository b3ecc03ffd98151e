"""Simple recurrent units: one matrix product for all tokens, then an elementwise recurrence."""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import Mistake
from ..feature_maps import wide
from ..ops.checks import check_masks
from ..ops.chunkwise.recall import until_end
from ..ops.scans.sru import sru
from ..ops.state import tensor_state
from .base import Mixer, is_linear, rows
from .options import MixerOptions
from .parts.onednn import Linear, linear

OPEN = 1e4  # the input of a sigmoid that is 1 then, in every type of number


@tensor_state
class SruState(NamedTuple):
    """The cell after the last token."""

    cell: Tensor  # (B,C), fp32 (float64 for float64 inputs)


class Sru(Mixer):
    """A recurrence whose gates read the cell before, and a highway: h = r c + (1 - r) x scale.

    --sru-projection makes the product one of two factors. The weights start as Lei et al. 2018 publish: they keep the variance of
    the input, the gates' weights half of it, and ``scale`` keeps it through the highway. --sru-init xavier is the start of SRU++.
    """

    state_type: type = SruState
    norm: Any
    settings: ClassVar[tuple[str, ...]] = (
        "sru_projection", "sru_projection_norm", "sru_rescale", "sru_highway_bias", "sru_init", "sru_input_bias", "sru_tanh",
        "sru_dropout", "sru_projection_dropout", "units_alone",
    )  # fmt: skip

    def __init__(self, embed_dim: int, heads: int = 1, config: Any = None, **given) -> None:
        super().__init__(embed_dim, heads)
        settings = self.read_settings(config, given)
        self.takes_source = not settings.sru_projection
        width, dropout = settings.sru_projection or embed_dim, settings.sru_projection_dropout
        for option, wanted in (("norm", settings.sru_projection_norm), ("dropout", dropout)):
            if wanted and not settings.sru_projection:
                raise Mistake(f"--sru-projection-{option} belongs to a projection; give its width with --sru-projection")
        self.prepare(width, settings, settings.sru_rescale)
        self.down_proj: Any = Linear(embed_dim, width, bias=False) if settings.sru_projection else None
        self.norm, self.dropout = nn.LayerNorm(width) if settings.sru_projection_norm else None, nn.Dropout(dropout)
        self.reset_parameters()

    @classmethod
    def of_layer(cls, embed_dim: int, num_heads: int, config: Any, layer: int, layers: int) -> Sru:
        """Returns the mixer of one layer. As published, the last one drops nothing of its cell."""
        mixer = cls(embed_dim, num_heads, config)
        mixer.cell_dropout *= layer < layers - 1
        return mixer

    def prepare(self, width: int, settings: MixerOptions, rescale: bool) -> None:
        self.highway_bias, self.init = settings.sru_highway_bias, str(settings.sru_init)
        self.scale = math.sqrt(1 + 2 * math.exp(self.highway_bias)) if rescale else 1.0
        self.tanh, self.cell_dropout, self.alone = settings.sru_tanh, settings.sru_dropout, settings.units_alone
        self.in_proj = Linear(width, 3 * self.embed_dim, bias=settings.sru_input_bias)
        if not settings.sru_input_bias:
            self.gate_bias = nn.Parameter(torch.empty(2, self.embed_dim))  # b_f, b_r
        self.gate_weight = nn.Parameter(torch.empty(2, self.embed_dim))  # v_f, v_r

    def linears(self) -> list[nn.Linear]:
        return [self.in_proj] if self.down_proj is None else [self.down_proj, self.in_proj]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        biases = self.in_proj.bias[self.embed_dim :].view(2, -1) if self.in_proj.bias is not None else self.gate_bias
        if self.in_proj.bias is not None:
            nn.init.zeros_(self.in_proj.bias)
        biases[0], biases[1] = 0, self.highway_bias
        if self.init == "xavier":
            for layer in self.linears():
                nn.init.xavier_uniform_(layer.weight)
            self.in_proj.weight *= math.sqrt(1 - self.dropout.p)
            nn.init.uniform_(self.gate_weight, -1, 1)
            return
        for layer in self.linears():
            bound = math.sqrt(3 / layer.in_features)
            nn.init.uniform_(layer.weight, -bound, bound)
        self.in_proj.weight[self.embed_dim :] *= math.sqrt(0.5)
        nn.init.uniform_(self.gate_weight, -math.sqrt(1.5), math.sqrt(1.5))

    def forward(
        self,
        x: Tensor,
        state: SruState | None = None,
        padding_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
        source: Tensor | None = None,
        **unused,
    ) -> tuple[Tensor, SruState]:
        return self.recur(
            self.inner(x) if source is None else source, x, None if state is None else state.cell, padding_mask, reset_mask
        )

    def inner(self, x: Tensor) -> Tensor:
        """Returns what the product reads, (T,B,width)."""
        inner = x if self.down_proj is None else self.down_proj(x)
        return self.dropout(inner if self.norm is None else self.norm(inner))

    def projections(self) -> dict[str, dict[str, slice]]:
        width = self.embed_dim
        return {"in_proj": rows(**{"input": width, "forget gate": width, "highway gate": width})}

    def explain(self, x: Tensor) -> dict[str, Tensor]:
        return self.explain_memory(self.inner(x))

    def explain_memory(self, inner: Tensor) -> dict[str, Tensor]:
        """Returns, for each token, the mean over the units of its factor in the last cell, and of 1 - f_t. The last cell is the sum
        of (1 - f_t) u_t times all later f."""
        u, forget, _ = wide(self.product(inner)).chunk(3, -1)
        c, gates = torch.zeros_like(u[0]), []
        for u_t, forget_t in zip(u, forget):
            gates.append(torch.sigmoid(forget_t + self.gate_weight[0] * c))
            c = torch.lerp(u_t, c, gates[-1])
        f = torch.stack(gates).transpose(0, 1)  # (1,T,C)
        left = until_end(f[:, None])[:, 0].exp()
        return {"memory": ((1 - f) * left).mean(-1), "write": (1 - f).mean(-1)}

    def product(self, inner: Tensor) -> Tensor:
        """Returns u, F and R side by side, (T,B,3C)."""
        if self.in_proj.bias is not None:
            return self.in_proj(inner)
        biases = F.pad(self.gate_bias.flatten(), (self.embed_dim, 0))
        if not is_linear(self.in_proj):
            return self.in_proj(inner) + biases
        return linear(inner, self.in_proj.weight, biases)

    def recur(
        self, inner: Tensor, x: Tensor, cell: Tensor | None, padding_mask: Tensor | None, reset_mask: Tensor | None
    ) -> tuple[Tensor, SruState]:
        """Returns h and the state. The product reads inner (T,B,width), and the highway passes x (T,B,C)."""
        product, masks = self.product(inner), (padding_mask, reset_mask)
        if self.tanh:
            h, cell = self.with_tanh(product, x, cell, *masks)
        else:
            h, cell = sru(product, x, self.gate_weight[0], self.gate_weight[1], cell, *masks, self.scale)
        if self.training and self.cell_dropout:
            skipped = x * self.scale
            kept = torch.empty_like(h[:1]).bernoulli_(1 - self.cell_dropout) / (1 - self.cell_dropout)  # the same for all tokens
            h = without_padding(skipped + (h - skipped) * kept, padding_mask)
        return h, SruState(cell)

    def with_tanh(
        self, product: Tensor, x: Tensor, cell: Tensor | None, padding_mask: Tensor | None, reset_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns h = r tanh(c) + (1 - r) x scale and the last cell. A recurrence whose highway passes cells alone gives all c."""
        check_masks(padding_mask, reset_mask, (x.shape[1], x.shape[0]))
        u, forget, highway = wide(product).chunk(3, -1)
        if padding_mask is not None:
            forget = forget.masked_fill(padding_mask.t()[..., None], OPEN)  # c stays
        alone = torch.cat([u, forget, torch.full_like(u, OPEN)], -1)
        v_forget, v_highway = wide(self.gate_weight)
        cells, last = sru(alone, torch.zeros_like(u), v_forget, torch.zeros_like(v_highway), cell, None, reset_mask)
        first = torch.zeros_like(u[:1]) if cell is None else cell[None]
        before = torch.cat([first, cells[:-1]])
        if reset_mask is not None:
            before = before.masked_fill(reset_mask.t()[..., None], 0)
        h = torch.lerp(wide(x) * self.scale, cells.tanh(), torch.sigmoid(highway + v_highway * before))
        return without_padding(h.to(product.dtype), padding_mask), last


def without_padding(h: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Returns h (T,B,C) with 0 at padding."""
    return h if padding_mask is None else h.masked_fill(padding_mask.t()[..., None], 0)
