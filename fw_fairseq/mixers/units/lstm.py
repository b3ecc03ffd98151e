"""The long short-term memory (Hochreiter and Schmidhuber 1997), with the forget gate of Gers et al. 2000."""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...autograd import without_autocast
from ...feature_maps import wide
from ...ops.checks import check_masks, check_sequences, check_tokens
from ...ops.state import tensor_state
from ..base import Mixer, rows
from ..sru import without_padding


@tensor_state
class LstmState(NamedTuple):
    """The output and the cell after the last token, in fp32 (float64 for float64 inputs)."""

    hidden: Tensor  # (B,C)
    cell: Tensor  # (B,C)


class Lstm(Mixer):
    """i, f, z, o = W x_t + U h_{t-1} + b; c_t = sigmoid(f + 1) c_{t-1} + sigmoid(i) tanh(z); h_t = sigmoid(o) tanh(c_t).

    Weights start uniform up to 1/sqrt(C), and b at 0.
    """

    state_type: type = LstmState
    takes_source = True
    settings: ClassVar[tuple[str, ...]] = ("units_alone",)

    def __init__(self, embed_dim: int, heads: int = 1, config: Any = None, **given) -> None:
        super().__init__(embed_dim, heads)
        self.alone = self.read_settings(config, given).units_alone
        self.in_proj = nn.Linear(embed_dim, 4 * embed_dim)
        self.recurrent = nn.Parameter(torch.empty(4 * embed_dim, embed_dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.embed_dim)
        for weight in (self.in_proj.weight, self.recurrent):
            nn.init.uniform_(weight, -bound, bound)
        nn.init.zeros_(self.in_proj.bias)

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        padding_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
        source: Tensor | None = None,
        **unused,
    ) -> tuple[Tensor, Any]:
        h, state = self.outputs(x if source is None else source, state, padding_mask, reset_mask)
        return without_padding(h.to(x.dtype), padding_mask), state

    def outputs(
        self, x: Tensor, state: LstmState | None, padding_mask: Tensor | None, reset_mask: Tensor | None
    ) -> tuple[Tensor, LstmState]:
        """All h (T,B,C) in fp32 at least, and the state after the last token."""
        check_tokens("x", x, x.shape[0])
        check_masks(padding_mask, reset_mask, (x.shape[1], x.shape[0]))
        if state is not None:
            check_sequences(state.hidden, x.shape[1])
        inputs, weight = wide(self.in_proj(x)), wide(self.recurrent)
        with without_autocast(x.device.type):
            return self.recur(inputs, weight, state, padding_mask, reset_mask)

    def recur(
        self, inputs: Tensor, weight: Tensor, state: LstmState | None, padding_mask: Tensor | None, reset_mask: Tensor | None
    ) -> tuple[Tensor, LstmState]:
        """The same from W x + b (T,B,4C) and U."""
        outputs = []
        h = c = inputs.new_zeros(inputs.shape[1], self.embed_dim)
        h, c = (h, c) if state is None else (state.hidden, state.cell)
        for t, given in enumerate(inputs.unbind(0)):
            if reset_mask is not None:
                h, c = (part.masked_fill(reset_mask[:, t, None], 0) for part in (h, c))
            i, f, z, o = (given + F.linear(h, weight)).chunk(4, -1)
            cell = torch.sigmoid(f + 1) * c + torch.sigmoid(i) * torch.tanh(z)
            output = torch.sigmoid(o) * torch.tanh(cell)
            if padding_mask is not None:
                kept = padding_mask[:, t, None]
                output, cell = torch.where(kept, h, output), torch.where(kept, c, cell)
            h, c = output, cell
            outputs.append(h)
        return torch.stack(outputs), LstmState(h, c)

    def projections(self) -> dict[str, dict[str, slice]]:
        width = self.embed_dim
        return {"in_proj": rows(**{"input gate": width, "forget gate": width, "input": width, "output gate": width})}
