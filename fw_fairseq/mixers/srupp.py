"""SRU++: a simple recurrent unit whose product reads the result of narrow attention over the last tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import Mistake
from ..ops.scans.pooling import last_weights
from ..ops.state import tensor_state
from .base import Mixer, join_heads, rows, split_heads
from .look_back import Reach, View, WindowState, attend, look_back, with_memory
from .parts.onednn import Linear
from .sru import Sru


@tensor_state
class SruppState(NamedTuple):
    """The cell after the last token, and the last R tokens; see ``look_back.WindowState``."""

    cell: Tensor  # (B,C), fp32 (float64 for float64 inputs)
    memory: Tensor | None  # (B,R,width): the last R tokens, as attention reads them; None where ``inputs`` are kept
    filled: Tensor  # (B,R), False where there was no token
    inputs: Tensor | None = None  # (B,R,C): the last R inputs, which W_1 projects anew
    place: Tensor | None = None  # (B): the next token's place in its segment; None: each segment has one token


class Srupp(Sru):
    """z = W_1 x; the product of SRU reads drop(LayerNorm(z + alpha attention(z, W_k z, W_v z))). alpha is 0 at the start, and there
    are no positions.

    Every token sees itself and the ``--srupp-memory`` tokens before it, however the text was cut into segments. With
    ``--srupp-segment`` L, token i of each L tokens of a text sees i more.
    """

    state_type = SruppState
    settings = (
        "srupp_width", "srupp_heads", "srupp_memory", "srupp_segment", "srupp_dropout", "srupp_rescale", "attention_dropout",
        "sru_highway_bias", "sru_init", "sru_input_bias", "sru_tanh", "sru_dropout", "units_alone",
    )  # fmt: skip

    def __init__(self, embed_dim: int, heads: int = 1, config: Any = None, **given) -> None:
        Mixer.__init__(self, embed_dim, heads)
        settings = self.read_settings(config, given)
        width, self.inner_heads = settings.srupp_width or max(1, embed_dim // 4), settings.srupp_heads
        self.reach, self.attention_dropout = Reach(settings.srupp_memory, settings.srupp_segment), settings.attention_dropout
        if width % self.inner_heads:
            raise Mistake(f"--srupp-heads is {self.inner_heads}; it must divide the width of the attention, {width}")
        self.prepare(width, settings, settings.srupp_rescale)
        self.down_proj = Linear(embed_dim, width, bias=False)
        self.kv_proj = Linear(width, 2 * width, bias=False)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(settings.srupp_dropout)
        self.alpha = nn.Parameter(torch.zeros(1))
        self.reset_parameters()

    def linears(self) -> list[nn.Linear]:
        return [self.down_proj, self.kv_proj, self.in_proj]

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        state: SruppState | None = None,
        padding_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
        *,
        decoding: bool = False,
        **unused,
    ) -> tuple[Tensor, SruppState]:
        z, inputs = self.down_proj(x), x.transpose(0, 1)
        memory = None if state is None else WindowState(*state[1:])
        view = look_back(inputs, memory, self.reach, padding_mask, reset_mask)
        seen, memory = with_memory(view, inputs, z.transpose(0, 1), memory, self.down_proj, decoding)
        inner = self.attended(z, seen.transpose(0, 1), view)
        h, after = self.recur(inner, x, None if state is None else state.cell, padding_mask, reset_mask)
        return h, SruppState(after.cell, *memory)

    def attended(self, z: Tensor, seen: Tensor, view: View) -> Tensor:
        """Maps z (T,B,width), and the z of all tokens that these see, (S,B,width), to what the product reads."""
        return self.dropout(self.norm(z + self.alpha * self.read(z, seen, view)))

    def explain(self, x: Tensor) -> dict[str, Tensor]:
        """Returns the attention weights of the last token, and the weights of the tokens in the last cell."""
        z = self.down_proj(x)
        found = self.explain_memory(self.attended(z, z, look_back(z.transpose(0, 1), None, self.reach, None, None)))
        q, k = (split_heads(part, self.inner_heads)[0] for part in (z, self.kv_proj(z).chunk(2, -1)[0]))  # (H,T,X)
        scores = (q[:, -1:] @ k.mT).squeeze(1) * q.shape[-1] ** -0.5
        return {"attention": last_weights(scores[None], self.reach.window(len(x)))[0]} | found

    def read(self, queries: Tensor, seen: Tensor, view: View) -> Tensor:
        """Maps queries (T,B,width) and the tokens of the view (S,B,width) to the output of attention, (T,B,width)."""
        parts = (queries, *self.kv_proj(seen).chunk(2, -1))
        dropout = self.attention_dropout if self.training else 0.0
        q, k, v = (split_heads(x, self.inner_heads) for x in parts)
        return join_heads(attend(q, k, v, view, dropout=dropout))

    def projections(self) -> dict[str, dict[str, slice]]:
        width = self.kv_proj.in_features
        return super().projections() | {"kv_proj": rows(k=width, v=width)}

    def state_size(self) -> int:
        return self.embed_dim + self.reach.most * self.kv_proj.in_features
