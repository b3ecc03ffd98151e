"""The state that a layer carries between calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .factored import Factors

State = TypeVar("State", bound=tuple)


def index_select(self: State, order: Tensor) -> State:
    """The state of the sequences ``order`` (long, along B), for beam search and for batches that lose finished sequences.

    It is the same one for the order that they have already, as in each step of greedy search. A GPU is not asked about that.
    """
    if order.device.type == "cpu" and torch.equal(order, torch.arange(next(x.shape[0] for x in self if x is not None))):
        return self
    return _map(self, lambda x: x.index_select(0, order))


def join(states: list[State]) -> State:
    """The states of several batches as one."""
    kind: Any = type(states[0])
    return kind(*(None if parts[0] is None else torch.cat(parts) for parts in zip(*states)))


def detach(self: State) -> State:
    """The state without its gradient."""
    return _map(self, lambda x: x.detach())


def to(self: State, *args, **kwargs) -> State:
    """The state on another device or in another dtype, as ``Tensor.to``. Masks and positions keep their dtype."""

    def moved(x: Tensor) -> Tensor:
        if x.dtype.is_floating_point:
            return x.to(*args, **kwargs)
        return x.to(x.new_empty(0).to(*args, **kwargs).device)

    return _map(self, moved)


def _map(self: State, change: Callable[[Any], Any]) -> State:
    kind: Any = type(self)
    return kind(*(None if x is None else change(x) for x in self))


def tensor_state(kind: Any) -> Any:
    """Decorates a NamedTuple whose fields are None or tensors that begin with B: it is then moved, reordered and detached as a
    whole."""
    kind.join = staticmethod(join)
    for method in (index_select, detach, to, _map):
        setattr(kind, method.__name__, method)
    return kind


def joined(states: list) -> Any:
    """Returns the states of several batches, which are of one type and read from their first tokens on, as one."""
    return states[0].join(states)


@tensor_state
class FastWeightState(NamedTuple):
    """The state of one fast-weight layer. Its size is at most that of the memory, however many tokens were seen."""

    memory: Tensor | Factors  # (B,H,K,V), fp32 (float64 for float64 inputs); Factors where decoding asked for them
    normaliser: Tensor | None = None  # (B,H,K): n_t of attention normalisation
    log_scale: Tensor | None = None  # (B,H): memory and normaliser are kept divided by exp(log_scale)
    recent: Tensor | None = None  # (B,S,X): the last inputs of a layer's short convolution. The operation leaves it and those below
    previous: Tensor | None = None  # (B,1,C): the last token, of a layer that mixes each token with the one before it
    position: Tensor | None = None  # (B,1), long: the tokens of the text so far, of a layer with rotary positions


class SavedState(tuple):
    """A state read from a checkpoint, until its mixer makes its own type of state from it."""

    __slots__ = ()

    def detach(self) -> SavedState:
        return self

    def to(self, device: str) -> SavedState:
        """Itself: it stays on the CPU, and is saved from there again if no mixer read it in between."""
        return self
