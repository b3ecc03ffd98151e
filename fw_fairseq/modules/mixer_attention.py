"""A mixer behind the interface of fairseq's self-attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..mixers import Mixer
from .stateful import Stateful, StatefulModule
from .streams import LayerStates


class MixerAttention(Stateful):
    """Takes the place of fairseq's MultiheadAttention in layer number ``layer``. ``source``: the sparse layer that the mixer's
    projection reads in place of the tokens, or None."""

    def __init__(self, mixer: Mixer, layer: int) -> None:
        super().__init__(mixer.state_type, layer)
        self.mixer = mixer
        self.source: StatefulModule | None = None
        self.num_heads, self.head_dim = mixer.num_heads, mixer.head_dim

    def forward(
        self,
        query: Tensor,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        states: LayerStates | None = None,
        reset_mask: Tensor | None = None,
        shared: dict | None = None,
        **unused,
    ) -> tuple[Tensor, None]:
        """Maps query (T,B,C) to y (T,B,C), and gives no attention weights.

        ``incremental_state`` holds the state of decoding, ``states`` those of streams; at most one of them is used, in this order.
        ``reset_mask``: (B,T), True at the first token of a new text. ``shared``: see ``Mixer.forward``.
        """
        decoding = incremental_state is not None
        states = None if decoding else states
        state = self.state_before(incremental_state, states, query.device)
        self.mixer.redraw(keep=states is not None)  # in here, so that activation checkpointing draws the same numbers again
        options: dict[str, Any] = {"decoding": decoding, "group": None if states is None else states.group}
        if self.mixer.takes_shared:
            options["shared"] = shared
        if self.mixer.takes_keep_state:
            options["keep_state"] = decoding or states is not None
        if self.source is not None:
            options["source"] = self.source(query, key_padding_mask, incremental_state, states, reset_mask)
        y, state = self.mixer(query, state, key_padding_mask, reset_mask, **options)
        self.keep(state, incremental_state, states)
        return y, None
