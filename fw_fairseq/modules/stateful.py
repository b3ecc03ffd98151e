"""Parts of a layer that keep a state from one token, or segment, to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fairseq.incremental_decoding_utils import with_incremental_state
from torch import Tensor, nn

from ..mixers import Mixer
from ..ops.state import SavedState
from .streams import LayerStates


@with_incremental_state
class Incremental(nn.Module):
    """A part whose state is in fairseq's ``incremental_state`` while decoding, under the name ``state_name``."""

    state_name = "mixer"
    get_incremental_state: Callable[..., Any]
    set_incremental_state: Callable[..., Any]

    def _get_input_buffer(self, incremental_state: dict | None) -> Any:
        return self.get_incremental_state(incremental_state, self.state_name)

    def _set_input_buffer(self, incremental_state: dict | None, state: Any) -> None:
        self.set_incremental_state(incremental_state, self.state_name, state)

    def reorder_incremental_state(self, incremental_state: dict | None, new_order: Tensor) -> None:
        """Gives each hypothesis of a beam search the state of the hypothesis that it continues."""
        state = self._get_input_buffer(incremental_state)
        if state is not None:
            self._set_input_buffer(incremental_state, state.index_select(new_order))


class Stateful(Incremental):
    """A part with the state of ``state_type``. ``layer``: the name of its states in ``LayerStates``.

    While decoding, fairseq's ``incremental_state`` holds the state; with streams, ``LayerStates`` does. At most one is used, in
    this order.
    """

    def __init__(self, state_type: type, layer: int | str) -> None:
        super().__init__()
        self.state_type, self.layer = state_type, layer

    def state_before(self, incremental_state: dict | None, states: LayerStates | None, device: torch.device) -> Any:
        """The state that the call starts from; None where nothing was read yet."""
        if incremental_state is not None:
            state = self._get_input_buffer(incremental_state)
        else:
            state = None if states is None else states.before.get(self.layer)
        return self.state_type(*state).to(device) if isinstance(state, SavedState) else state

    def keep(self, state: Any, incremental_state: dict | None, states: LayerStates | None) -> None:
        """Keeps the state after the call."""
        if incremental_state is not None:
            self._set_input_buffer(incremental_state, state)
        elif states is not None:
            states.after[self.layer] = state


class StatefulModule(Stateful):
    """A module that maps x, its state and the masks of padding and of new texts to y and the next state."""

    def __init__(self, part: nn.Module, state_type: type, layer: str) -> None:
        super().__init__(state_type, layer)
        self.part = part

    def forward(
        self,
        x: Tensor,
        padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        states: LayerStates | None = None,
        reset_mask: Tensor | None = None,
    ) -> Tensor:
        """Maps x (T,B,C) to y (T,B,C')."""
        y, state = self.part(x, self.state_before(incremental_state, states, x.device), padding_mask, reset_mask)
        self.keep(state, incremental_state, states)
        return y


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
