"""The list of everything that this project changes in fairseq. The modules beside this one fill it as they are imported."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple


class Change(NamedTuple):
    """One thing that is changed."""

    place: str  # what is changed, as it is imported
    function: Callable  # its docstring is the entry of docs/fairseq_changes.md
    apply: Callable[[], None]


CHANGES: list[Change] = []


def replaces(owner: object, name: str) -> Callable[[Callable], Callable]:
    """Decorates a function that fairseq then calls in place of ``owner.name``, with the original as its first argument."""

    def register(function: Callable) -> Callable:
        def apply() -> None:
            original = getattr(owner, name)
            if not hasattr(original, "changed_by"):
                setattr(owner, name, changed(original, function))

        CHANGES.append(Change(f"{_path(owner)}.{name}", function, apply))
        return function

    return register


def changes(place: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Decorates a function without arguments that changes ``place`` when it is called."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        CHANGES.append(Change(place, function, function))
        return function

    return register


def changed(original: Callable, function: Callable) -> Callable:
    """Returns a function, which a class binds as its method."""

    @functools.wraps(original)
    def call(*args, **kwargs) -> Any:
        return function(original, *args, **kwargs)

    call.changed_by = function  # type: ignore[attr-defined]
    return call


def _path(owner: Any) -> str:
    return owner.__name__ if inspect.ismodule(owner) else f"{owner.__module__}.{owner.__qualname__}"
