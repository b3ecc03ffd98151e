"""Attention to a whole sentence through one memory, behind the interface of fairseq's attention."""

from __future__ import annotations

from torch import Tensor, nn

from ..mixers.options import MixerOptions
from ..mixers.parts.source import SourceMemory
from .stateful import Incremental


class LinearAttention(Incremental, SourceMemory):
    """Takes the place of fairseq's MultiheadAttention. Decoding keeps only the memory of a source and its normaliser."""

    state_name = "source"

    def __init__(
        self, embed_dim: int, num_heads: int, config: MixerOptions, source_dim: int | None = None, name: str = "encoder"
    ) -> None:
        super().__init__(embed_dim, num_heads, config, source_dim, name)
        self.source: nn.Module | None = None  # the sparse layer that the projections of self-attention read

    def forward(
        self, query: Tensor, key: Tensor, key_padding_mask: Tensor | None = None, incremental_state: dict | None = None, **unused
    ) -> tuple[Tensor, None]:
        """Maps query (T,B,C) and key (S,B,C') to y (T,B,C) and None, as there are no attention weights. key_padding_mask:
        (B,S), True at padding."""
        self.feature_map.redraw()  # in here, because checkpointing runs it again with the same random numbers
        state = self._get_input_buffer(incremental_state)
        if self.source is not None:
            query = key = self.source(query, None, key_padding_mask)[0]
        if incremental_state is None and query.shape[1] == key.shape[1]:
            return self.out_proj(self.attend(query, key, key_padding_mask)), None
        if state is None:
            state = self.summarise(key, key_padding_mask)
            state = state._replace(beam=query.shape[1] // len(state.memory))
            self._set_input_buffer(incremental_state, state)
        return self.out_proj(self.read(query, state)), None
