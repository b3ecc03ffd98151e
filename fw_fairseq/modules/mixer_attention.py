"""A mixer behind the interface of fairseq's self-attention."""

from __future__ import annotations

from fairseq.incremental_decoding_utils import with_incremental_state
from torch import Tensor, nn

from ..mixers import Mixer
from ..ops.state import SavedState
from .streams import LayerStates


@with_incremental_state
class MixerAttention(nn.Module):
    """Takes the place of fairseq's MultiheadAttention in layer number ``layer``."""

    def __init__(self, mixer: Mixer, layer: int):
        super().__init__()
        self.mixer, self.layer = mixer, layer
        self.num_heads, self.head_dim = mixer.num_heads, mixer.head_dim

    def forward(
        self,
        query: Tensor,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        states: LayerStates | None = None,
        reset_mask: Tensor | None = None,
        **unused,
    ) -> tuple[Tensor, None]:
        """Maps query (T,B,C) to y (T,B,C), and gives no attention weights.

        ``incremental_state`` holds the state of decoding, ``states`` those of streams; at most one of them is used, in this order.
        ``reset_mask``: (B,T), True at the first token of a new text.
        """
        decoding = incremental_state is not None
        if decoding:
            states, state = None, self._get_input_buffer(incremental_state)
        else:
            state = None if states is None else states.before.get(self.layer)
        if isinstance(state, SavedState):
            state = self.mixer.state_type(*state).to(query.device)
        self.mixer.redraw(keep=states is not None)  # in here, so that activation checkpointing draws the same numbers again
        group = None if states is None else states.group
        y, state = self.mixer(query, state, key_padding_mask, reset_mask, decoding=decoding, group=group)
        if decoding:
            self._set_input_buffer(incremental_state, state)
        elif states is not None:
            states.after[self.layer] = state
        return y, None

    def _get_input_buffer(self, incremental_state):
        return self.get_incremental_state(incremental_state, "mixer")

    def _set_input_buffer(self, incremental_state, state) -> None:
        self.set_incremental_state(incremental_state, "mixer", state)

    def reorder_incremental_state(self, incremental_state, new_order: Tensor) -> None:
        """Gives each hypothesis of a beam search the state of the hypothesis that it continues."""
        state = self._get_input_buffer(incremental_state)
        if state is not None:
            self._set_input_buffer(incremental_state, state.index_select(new_order))
