"""The state of streams between their segments, and how it gets from a decoder's forward to its mixers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.distributed import ProcessGroup


class LayerStates:
    """The states of one decoder's mixers, by layer: ``before`` the segment that is being read, and ``after`` it.

    ``group``: the workers that hold consecutive parts of each segment. Each of them has all states.
    """

    def __init__(self, start: dict[int | str, Any] | None = None, group: ProcessGroup | None = None) -> None:
        self.before: dict[int | str, Any] = {}
        self.after: dict[int | str, Any] = {} if start is None else dict(start)
        self.group, self.resets = group, False

    def advance(self, resets: bool = False) -> None:
        """Makes the states after the last segment those before the next one, without gradients.

        A segment that is computed again, as activation checkpointing does, starts from the same states until then. ``resets``:
        texts may end within the next segment.
        """
        self.before, self.after = {layer: state.detach() for layer, state in self.last().items()}, {}
        self.resets = resets

    def last(self) -> dict[int | str, Any]:
        """The states that the next segment starts from. A layer that LayerDrop left out keeps its state, unless texts may have
        ended in the segment."""
        return self.after if self.resets else self.before | self.after


class Streams:
    """The states of all decoders that read the same streams. Each decoder, as each model of an ensemble, has states of its own.

    ``group``: see ``LayerStates``. ``start``: the states that a decoder starts from, by layer; those of a checkpoint, or none.

    fairseq's decoder and decoder layer have no argument for such states. ``FastWeightDecoder.forward`` therefore calls fairseq's
    forward within ``with_arguments(layers, ...)``, so that every layer is called with the states as arguments of its own, and
    ``FastWeightDecoderLayer.forward`` hands them to its mixer in the same way. They are arguments at each call: activation
    checkpointing saves them and calls the layer with them again in the backward, LayerDrop leaves them out with the layer, and no
    module holds them afterwards, so that copies and pickles of a model have no stream.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group
        self.start: dict[int | str, Any] = {}
        self.states: WeakKeyDictionary[nn.Module, LayerStates] = WeakKeyDictionary()

    def of(self, decoder: nn.Module) -> LayerStates:
        """The states of this decoder."""
        if decoder not in self.states:
            self.states[decoder] = LayerStates(self.start, self.group)
        return self.states[decoder]

    def last(self) -> dict[int | str, Any]:
        """The states that the next segment starts from, of the first decoder that read the streams: training has only one."""
        first = next(iter(self.states.values()), None)
        return self.start if first is None else first.last()

    def restart(self, start: dict[int | str, Any] | None = None) -> None:
        """Forgets all states; the next segment starts from ``start``, or from empty states."""
        self.start = {} if start is None else start
        self.states.clear()


def of_this_thread(hook: Callable) -> Callable:
    """A module's hook for the calls by the thread that asks for it; it leaves those by others as they are."""
    own = get_ident()

    @functools.wraps(hook)
    def run(*args, **kwargs) -> Any:  # with half of the arguments, where another thread calls while the hook is being registered
        return hook(*args, **kwargs) if get_ident() == own else None

    return run


@contextlib.contextmanager
def with_arguments(modules: Iterable[nn.Module], **arguments) -> Iterator[None]:
    """Calls of these modules get these keyword arguments, too, within the context; None leaves one out. Calls by other threads stay
    as they are."""
    given = {name: value for name, value in arguments.items() if value is not None}
    if not given:  # torch.compile cannot look at threads
        yield
        return

    @of_this_thread
    def add(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, kwargs | given

    hooks = [module.register_forward_pre_hook(add, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
