"""The state that a layer carries between calls."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .factored import Factors, no_factors


def index_select(self, order: Tensor):
    """The state of the sequences ``order`` (long, along B), for beam search and for batches that lose finished sequences.

    It is the same one for the order that they have already, as in each step of greedy search. A GPU is not asked about that.
    """
    if order.device.type == "cpu" and torch.equal(order, torch.arange(next(x.shape[0] for x in self if x is not None))):
        return self
    return self._map(lambda x: x.index_select(0, order))


def join(states):
    """The states of several batches as one."""
    return type(states[0])(*(None if parts[0] is None else torch.cat(parts) for parts in zip(*states)))


def detach(self):
    return self._map(lambda x: x.detach())


def to(self, *args, **kwargs):
    """The state on another device or in another dtype, as ``Tensor.to``. Masks and positions keep their dtype."""

    def moved(x):
        if x.dtype.is_floating_point:
            return x.to(*args, **kwargs)
        return x.to(x.new_empty(0).to(*args, **kwargs).device)

    return self._map(moved)


def _map(self, change):
    return type(self)(*(None if x is None else change(x) for x in self))


def tensor_state(kind):
    """Decorates a NamedTuple whose fields are None or tensors that begin with B: it is then moved, reordered and detached as a
    whole."""
    kind.join = staticmethod(join)
    for method in (index_select, detach, to, _map):
        setattr(kind, method.__name__, method)
    return kind


def joined(states: list):
    """Returns the states of several batches, which are of one type and read from their first tokens on, as one."""
    return states[0].join(states)


state = tensor_state  # its former name, for packages that import it


@tensor_state
class FastWeightState(NamedTuple):
    """The state of one fast-weight layer. Its size is at most that of the memory, however many tokens were seen."""

    memory: Tensor | Factors  # (B,H,K,V), fp32 (float64 for float64 inputs); Factors where decoding asked for them
    normaliser: Tensor | None = None  # (B,H,K): n_t of attention normalisation
    log_scale: Tensor | None = None  # (B,H): memory and normaliser are kept divided by exp(log_scale)
    recent: Tensor | None = None  # (B,S,X): the last inputs of a layer's short convolution. The operation leaves it and those below
    previous: Tensor | None = None  # (B,1,C): the last token, of a layer that mixes each token with the one before it
    position: Tensor | None = None  # (B,1), long: the tokens of the text so far, of a layer with rotary positions


def empty_state(
    sizes, device, dtype: torch.dtype, attention_norm: bool, log_scale: bool, factored: bool = False
) -> FastWeightState:
    """The state before the first token, for sizes (B, H, T, K, V)."""
    batch, heads, _, key_width, value_width = sizes
    zeros = no_factors if factored else torch.zeros
    memory = zeros(batch, heads, key_width, value_width, device=device, dtype=dtype)
    normaliser = torch.zeros(batch, heads, key_width, device=device, dtype=dtype) if attention_norm else None
    scale = torch.full((batch, heads), -torch.inf, device=device, dtype=dtype) if log_scale else None
    return FastWeightState(memory, normaliser, scale)


class SavedState(tuple):
    """A state read from a checkpoint, until its mixer makes its own type of state from it."""

    __slots__ = ()

    def detach(self) -> SavedState:
        return self

    def to(self, device: str) -> SavedState:
        """Itself: it stays on the CPU, and is saved from there again if no mixer read it in between."""
        return self
