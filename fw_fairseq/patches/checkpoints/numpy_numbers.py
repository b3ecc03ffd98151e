"""Stand-ins for the functions that rebuild NumPy's numbers and arrays of numbers when a checkpoint is read.

NumPy's own functions would build objects from any bytes, and arrays that reach beyond their bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from omegaconf import DictConfig, OmegaConf

from ...errors import Mistake

OTHER = "NumPy's data of another kind than numbers"
MODULES = "numpy.core.multiarray", "numpy._core.multiarray"  # NumPy 1 and 2


def require(fits: object, otherwise: str) -> None:
    """Refuses a file that does not fit; ``otherwise`` is what it holds."""
    if not fits:
        raise Mistake(f"it holds {otherwise}")


class NumberType:
    """Stands for ``numpy.dtype``: a kind of numbers with its size in bytes, and their byte order."""

    __slots__ = ("code", "order")

    def __init__(self, code: Any, *_: object) -> None:
        require(type(code) is str and re.fullmatch(r"[biufc]\d{1,2}", code, re.ASCII), OTHER)
        self.code, self.order = code, "="

    def __setstate__(self, state: Any) -> None:
        require(type(state) is tuple and state[2:5] == (None, None, None), OTHER)  # no fields of a record
        require(type(state[1]) is str and state[1] in ("<", ">", "|", "="), OTHER)
        self.order = state[1]

    def dtype(self) -> numpy.dtype:
        return numpy.dtype(self.code).newbyteorder(self.order)


class Array:
    """Stands for ``numpy.ndarray``: the array of numbers that its state describes."""

    __slots__ = ("numbers",)

    def __init__(self, *arguments: object) -> None:
        require(not arguments, "a call of numpy.ndarray, which is not run")
        self.numbers = numpy.empty(0)

    def __setstate__(self, state: Any) -> None:
        require(type(state) is tuple and len(state) == 5 and type(state[1]) is tuple, "a NumPy array of unknown layout")
        _, shape, kind, fortran, data = state
        require(all(type(size) is int and size >= 0 for size in shape), "a NumPy array of unknown shape")
        numbers = read_numbers(kind, data, math.prod(shape))
        self.numbers = numbers.reshape(shape, order="F" if fortran is True else "C")


def read_numbers(kind: Any, data: Any, count: int) -> numpy.ndarray:
    """Returns the numbers of this kind in these bytes."""
    require(type(kind) is NumberType and type(data) is bytes, OTHER)
    dtype = kind.dtype()
    require(len(data) == count * dtype.itemsize, f"{len(data)} bytes for {count} NumPy numbers of {dtype.itemsize} bytes")
    return numpy.frombuffer(bytearray(data), dtype) if data else numpy.empty(0, dtype)


def empty_array(kind: Any, *_: object) -> Array:
    """Stands for NumPy's ``_reconstruct``: the array gets its numbers with its state."""
    require(kind is Array, "a NumPy array of unknown type")
    return Array()


def number(kind: Any, data: Any) -> numpy.number | numpy.bool_:
    """Stands for NumPy's ``scalar``."""
    return read_numbers(kind, data, 1)[0]


def no_bytes() -> bytes:
    """Stands for ``bytes``: an array without numbers has none."""
    return b""


STAND_INS: list[Any] = [
    (argparse.Namespace, "argparse.Namespace"),
    (NumberType, "numpy.dtype"),
    (Array, "numpy.ndarray"),
    (no_bytes, "builtins.bytes"),
    *((empty_array, f"{module}._reconstruct") for module in MODULES),
    *((number, f"{module}.scalar") for module in MODULES),
]


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Within this block, torch's unpickler takes the stand-ins too. Entries of the same names that the program had added to
    torch's list are set aside until the end of the block."""
    before, names = torch.serialization.get_safe_globals(), {name for _, name in STAND_INS}
    kept = [given for given in before if _full_path(given) not in names]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([*kept, *STAND_INS])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def _full_path(given: Any) -> str:
    return given[1] if isinstance(given, tuple) else f"{given.__module__}.{given.__qualname__}"


def without_stand_ins(content: Any, seen: dict | None = None) -> Any:
    """Returns what was loaded with NumPy's arrays in the place of the stand-ins; lists and dictionaries keep their identity. A file
    may also name a class or a function without calling it; this is refused."""
    seen = {} if seen is None else seen
    if isinstance(content, (Array, NumberType)):
        return content.numbers if isinstance(content, Array) else content.dtype()
    refuse_code(content)
    if id(content) in seen or not isinstance(content, (dict, list, tuple, set, frozenset, argparse.Namespace, DictConfig)):
        return seen.get(id(content), content)
    seen[id(content)] = content
    if isinstance(content, tuple):
        parts = [without_stand_ins(part, seen) for part in content]
        if any(new is not old for new, old in zip(parts, content)):
            seen[id(content)] = tuple(parts)
        return seen[id(content)]
    if isinstance(content, (DictConfig, set, frozenset)):
        refuse_objects(OmegaConf.to_container(content, resolve=False) if isinstance(content, DictConfig) else content)
        return content
    target = vars(content) if isinstance(content, argparse.Namespace) else content
    for key, part in list(enumerate(target) if isinstance(target, list) else target.items()):
        refuse_objects(key)
        target[key] = without_stand_ins(part, seen)
    return content


def refuse_objects(options: object) -> None:
    """Refuses options, plain containers, that hold a class, a function or one of NumPy's arrays. Keys of dictionaries, too."""
    require(not isinstance(options, (Array, NumberType)), "an option that is an array")
    refuse_code(options)
    if isinstance(options, (dict, list, tuple, set, frozenset)):
        for part in itertools.chain(*options.items()) if isinstance(options, dict) else options:
            refuse_objects(part)


def refuse_code(content: object) -> None:
    """Refuses a class, a function and a kind of torch's storages."""
    code = callable(content) or isinstance(content, torch.serialization.StorageType)
    require(not code, f"{getattr(content, '__name__', 'a type')}, which is neither a tensor nor an option")
