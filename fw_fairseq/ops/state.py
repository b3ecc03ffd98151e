"""What a layer remembers between calls."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .factored import Factors


def index_select(self, order: Tensor):
    """The state of the sequences ``order`` (long, along B): beam reordering, batch compaction."""
    return self._map(lambda x: x.index_select(0, order))


def detach(self):
    return self._map(lambda x: x.detach())


def to(self, *args, **kwargs):
    return self._map(lambda x: x.to(*args, **kwargs))


def _map(self, change):
    return type(self)(*(None if x is None else change(x) for x in self))


def state(kind):
    """Makes a NamedTuple of tensors, or None, that all begin with B one state: moved, reordered and detached as a whole."""
    for method in (index_select, detach, to, _map):
        setattr(kind, method.__name__, method)
    return kind


@state
class FastWeightState(NamedTuple):
    """However many tokens were seen, it is never larger than the memory."""

    memory: Tensor | Factors  # (B,H,K,V), fp32 (float64 for float64 inputs); Factors where decoding asked for them
    normaliser: Tensor | None = None  # (B,H,K): n_t of attention normalisation
    log_scale: Tensor | None = None  # (B,H): memory and normaliser are kept divided by exp(log_scale)


class SavedState(tuple):
    """A state from a checkpoint, until its mixer makes its own kind of it."""

    __slots__ = ()

    def detach(self) -> SavedState:
        return self

    def to(self, device: str) -> SavedState:
        """It is on the CPU, where it is saved again if nothing was read in between."""
        return self
