"""Softmax attention with sparse queries, keys and values."""

from __future__ import annotations

from torch import Tensor

from ...generation.kv_cache import Past, attend
from ...mixers.base import check_heads, join_heads, split_heads
from ..stateful import Stateful, StatefulModule
from ..streams import LayerStates
from .projections import Convolutions, RecentState, SparseSource


class SparseAttention(Stateful):
    """y_t = sum_s softmax(q_t k_s / sqrt(d)) v_s without an output projection; q, k and v are convolutions of a multiplicative
    dense layer. It takes the place of fairseq's MultiheadAttention. Between the segments of a stream only the convolutions
    carry over."""

    def __init__(self, embed_dim: int, heads: int, count: int, dropout: float, layer: int | str, part: str = "decoder") -> None:
        super().__init__(Past, layer)
        check_heads(embed_dim, heads, part)
        self.num_heads, self.head_dim, self.dropout = heads, embed_dim // heads, dropout
        self.source = StatefulModule(SparseSource(embed_dim, count), RecentState, f"{layer}.source")
        self.in_proj = Convolutions(embed_dim, count, {"q": embed_dim, "k": embed_dim, "v": embed_dim})

    def forward(
        self,
        query: Tensor,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        attn_mask: Tensor | None = None,
        states: LayerStates | None = None,
        reset_mask: Tensor | None = None,
        **unused,
    ) -> tuple[Tensor, None]:
        """Maps query (T,B,C) to y (T,B,C), and gives no attention weights. Attention is causal with ``attn_mask`` or while
        decoding."""
        source = self.source(query, key_padding_mask, incremental_state, states, reset_mask)
        q, k, v = (split_heads(part, self.num_heads) for part in self.in_proj(source).chunk(3, -1))
        if incremental_state is None:
            return join_heads(attend(q, k, v, key_padding_mask, attn_mask is not None, self.dropout_now())), None
        before: Past | None = self._get_input_buffer(incremental_state)
        past = (Past.empty(k, 0) if before is None else before).add(k, v, key_padding_mask)
        self._set_input_buffer(incremental_state, past)
        keys, values, hidden = past.tokens()
        return join_heads(attend(q, keys, values, hidden, len(query) > 1, self.dropout_now())), None

    def dropout_now(self) -> float:
        """Returns the dropout probability of the attention weights, which is 0 outside training."""
        return self.dropout if self.training else 0.0
