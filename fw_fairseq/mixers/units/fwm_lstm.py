"""An LSTM with a fast weight memory (Schlag et al. 2021b), which each output of the LSTM writes and reads several times."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...autograd import without_autocast
from ...feature_maps import wide
from ...ops.state import tensor_state
from ...rules.fwm import in_chunks
from ..sru import without_padding
from .lstm import Lstm, LstmState


@tensor_state
class FwmLstmState(NamedTuple):
    """The state of the LSTM and the memory after the last token, in fp32 (float64 for float64 inputs)."""

    hidden: Tensor  # (B,C)
    cell: Tensor  # (B,C)
    memory: Tensor  # (B,D D,D)


class FwmLstm(Lstm):
    """With h_t of an LSTM: a, b, v = tanh(W_w h_t), beta = sigmoid(w h_t + 1); the key is all products a_i b_j, and rule ``fwm``
    writes v under it. n, e_1, e_2, ... = tanh(W_r h_t); n becomes LayerNorm(read(n_i e_j)) for each e; y_t = h_t + W n."""

    state_type = FwmLstmState
    settings = (*Lstm.settings, "fwm_width", "fwm_reads")

    def __init__(self, embed_dim: int, heads: int = 1, config: Any = None, **given) -> None:
        settings = self.read_settings(config, given)
        self.width, self.reads = settings.fwm_width, settings.fwm_reads
        super().__init__(embed_dim, heads, config, **given)
        self.write_proj = nn.Linear(embed_dim, 3 * self.width + 1)
        self.read_proj = nn.Linear(embed_dim, (1 + self.reads) * self.width)
        self.out_proj = nn.Linear(self.width, embed_dim)
        bound = math.sqrt(6 / (embed_dim + self.width))
        for layer in (self.write_proj, self.read_proj):
            nn.init.uniform_(layer.weight, -bound, bound)
            nn.init.zeros_(layer.bias)

    def forward(
        self,
        x: Tensor,
        state: FwmLstmState | None = None,
        padding_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
        source: Tensor | None = None,
        **unused,
    ) -> tuple[Tensor, FwmLstmState]:
        before = None if state is None else LstmState(*state[:2])
        h, after = self.outputs(x if source is None else source, before, padding_mask, reset_mask)
        z = h.to(x.dtype)
        *parts, strength = self.write_proj(z).transpose(0, 1).split([self.width] * 3 + [1], -1)
        a, b, v = (torch.tanh(wide(part)) for part in parts)
        k, beta = products(a, b), torch.sigmoid(wide(strength).squeeze(-1) + 1)
        if padding_mask is not None:
            k, v = (part.masked_fill(padding_mask[..., None], 0) for part in (k, v))
        asked = torch.tanh(wide(self.read_proj(z))).transpose(0, 1)
        memory = h.new_zeros(x.shape[1], k.shape[2], self.width) if state is None else state.memory
        with without_autocast(x.device.type):
            n, memory = in_chunks(self.read_in_turn, [asked], k, v, beta, padding_mask, reset_mask, memory)
        y = z + self.out_proj(n.transpose(0, 1).to(x.dtype))
        return without_padding(y, padding_mask), FwmLstmState(*after, memory)

    def read_in_turn(self, read: Callable[[Tensor], Tensor], asked: Tensor) -> Tensor:
        """What the last of the reads gives, (B,C,D), for the first query and the second halves of all, (B,C,(1 + reads) D)."""
        n, *halves = asked.split(self.width, -1)
        for half in halves:
            n = F.layer_norm(read(products(n, half)), (self.width,))
        return n


def products(a: Tensor, b: Tensor) -> Tensor:
    """All products of the numbers of two vectors: (...,D), (...,D) -> (...,D D)."""
    return (a.unsqueeze(-1) * b.unsqueeze(-2)).flatten(-2)
