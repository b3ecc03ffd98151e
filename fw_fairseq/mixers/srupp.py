"""SRU++: a simple recurrent unit whose product reads the result of narrow attention over the last tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import Mistake
from ..ops.onednn import Linear
from ..ops.state import tensor_state
from ..ops.vectors.pooling import last_weights
from .base import Mixer, join_heads, rows, split_heads
from .look_back import View, WindowState, attend, look_back
from .sru import Sru


@tensor_state
class SruppState(NamedTuple):
    """The cell after the last token, and the last R tokens as attention reads them."""

    cell: Tensor  # (B,C), fp32 (float64 for float64 inputs)
    memory: Tensor  # (B,R,width): the last R tokens, as attention reads them
    filled: Tensor  # (B,R), False where there was no token


class Srupp(Sru):
    """z = W_1 x; the product of SRU reads drop(LayerNorm(z + alpha attention(z, W_k z, W_v z))). alpha is 0 at the start, and there
    are no positions.

    Every token sees itself and the ``--srupp-memory`` tokens before it, however the text was cut into segments.
    """

    state_type = SruppState
    options = ("sru_highway_bias", "srupp_width", "srupp_heads", "srupp_memory", "srupp_dropout")

    def __init__(self, embed_dim: int, num_heads: int, config):
        Mixer.__init__(self, embed_dim, num_heads)
        width, self.memory, self.inner_heads = config.srupp_width or max(1, embed_dim // 4), config.srupp_memory, config.srupp_heads
        if width % self.inner_heads:
            raise Mistake(f"--srupp-heads is {self.inner_heads}; it must divide the width of the attention, {width}")
        self.prepare(width, config.sru_highway_bias)
        self.down_proj = Linear(embed_dim, width, bias=False)
        self.kv_proj = Linear(width, 2 * width, bias=False)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(config.srupp_dropout)
        self.alpha = nn.Parameter(torch.zeros(1))
        self.reset_parameters()

    def linears(self) -> list[nn.Linear]:
        """Returns the linear layers, in the order of their use."""
        return [self.down_proj, self.kv_proj, self.in_proj]

    def forward(self, x: Tensor, state: SruppState | None = None, padding_mask=None, reset_mask=None, **unused):
        """Maps x (T,B,C) to h (T,B,C) and the state after the last token."""
        z = self.down_proj(x)
        memory = None if state is None else WindowState(*state[1:])
        view, memory = look_back(z.transpose(0, 1), memory, self.memory, padding_mask, reset_mask)
        inner = self.dropout(self.norm(z + self.alpha * self.read(z, view)))
        h, state = self.recur(inner, x, None if state is None else state.cell, padding_mask, reset_mask)
        return h, SruppState(state.cell, *memory)

    def explain(self, x: Tensor) -> dict[str, Tensor]:
        """Returns the attention weights of the last token, and the weights of the tokens in the last cell."""
        z = self.down_proj(x)
        view, _ = look_back(z.transpose(0, 1), None, self.memory, None, None)
        found = self.explain_memory(self.norm(z + self.alpha * self.read(z, view)))
        q, k = (split_heads(part, self.inner_heads)[0] for part in (z, self.kv_proj(z).chunk(2, -1)[0]))  # (H,T,X)
        scores = (q[:, -1:] @ k.mT).squeeze(1) * q.shape[-1] ** -0.5
        return {"attention": last_weights(scores[None], self.memory + 1)[0]} | found

    def read(self, queries: Tensor, view: View) -> Tensor:
        """Maps queries (T,B,width) to the output of attention, (T,B,width)."""
        parts = (queries, *self.kv_proj(view.tokens.transpose(0, 1)).chunk(2, -1))
        return join_heads(attend(*(split_heads(x, self.inner_heads) for x in parts), view))

    def projections(self) -> dict[str, dict[str, slice]]:
        """Maps each projection to the rows of each of its parts."""
        width = self.kv_proj.in_features
        return super().projections() | {"kv_proj": rows(k=width, v=width)}
