"""A mixer behind the interface of fairseq's self-attention."""

from __future__ import annotations

from fairseq.incremental_decoding_utils import with_incremental_state
from torch import Tensor, nn

from ..mixers import Mixer
from ..ops.state import SavedState


class CarriedState:
    """The mixers' states between consecutive segments of the same streams, by layer.

    ``advance()`` makes what the last segment left what the next one starts from, without gradients. Until then a segment that is
    computed again, as activation checkpointing does, starts from the same. A layer that LayerDrop left out keeps its state, unless
    ``resets``: texts may have ended in the segment. ``group``: the workers that hold consecutive parts of each segment, each of
    them all of the states.
    """

    def __init__(self, group=None):
        self.group, self.resets = group, False
        self.before: dict[int, object] = {}
        self.after: dict[int, object] = {}
        self.owner: object = None
        self.others: dict[int, CarriedState] = {}

    def advance(self) -> None:
        self.before, self.after = {layer: state.detach() for layer, state in self.last().items()}, {}

    def last(self) -> dict[int, object]:
        """Of each layer: what the next segment starts from."""
        return self.after if self.resets else self.before | self.after

    def clear(self) -> None:
        self.before, self.after, self.others = {}, {}, {}

    def of(self, owner) -> CarriedState:
        """Itself for the first model that asks, one each for the other models of an ensemble."""
        if self.owner is None:
            self.owner = owner
        return self if self.owner is owner else self.others.setdefault(id(owner), CarriedState(self.group))


@with_incremental_state
class MixerAttention(nn.Module):
    """Takes the place of fairseq's MultiheadAttention. Its decoder sets ``carried``, which gives and takes the state of whole
    segments, and ``reset_mask``; they stay for the backward, where activation checkpointing runs the layer once more."""

    def __init__(self, mixer: Mixer, layer: int):
        super().__init__()
        self.mixer, self.layer = mixer, layer
        self.num_heads, self.head_dim = mixer.num_heads, mixer.head_dim
        self.carried: CarriedState | None = None
        self.reset_mask: Tensor | None = None

    def forward(self, query: Tensor, key_padding_mask: Tensor | None = None, incremental_state=None, **unused):
        """query (T,B,C) -> y (T,B,C), no attention weights."""
        if incremental_state is not None:
            state = self._get_input_buffer(incremental_state)
        else:
            state = None if self.carried is None else self.carried.before.get(self.layer)
        if isinstance(state, SavedState):
            state = self.mixer.state_type(*state).to(query.device)
        self.mixer.redraw(keep=self.carried is not None)  # in here: what is checkpointed is run again with the same random numbers
        self.mixer.decoding = incremental_state is not None
        self.mixer.group = self.carried.group if self.carried is not None and not self.mixer.decoding else None
        y, state = self.mixer(query, state, key_padding_mask, self.reset_mask)
        self.mixer.decoding, self.mixer.group = False, None  # who calls the mixer itself does neither
        if incremental_state is not None:
            self._set_input_buffer(incremental_state, state)
        elif self.carried is not None:
            self.carried.after[self.layer] = state
        return y, None

    def __getstate__(self) -> dict:
        """A copy of the model, as --store-ema makes one, reads no stream: the states are in a graph, which has no copies."""
        return self.__dict__ | {"carried": None, "reset_mask": None}

    def _get_input_buffer(self, incremental_state):
        return self.get_incremental_state(incremental_state, "mixer")

    def _set_input_buffer(self, incremental_state, state) -> None:
        self.set_incremental_state(incremental_state, "mixer", state)

    def reorder_incremental_state(self, incremental_state, new_order: Tensor) -> None:
        """Beam search: the state of each new hypothesis is that of the one it came from."""
        state = self._get_input_buffer(incremental_state)
        if state is not None:
            self._set_input_buffer(incremental_state, state.index_select(new_order))
