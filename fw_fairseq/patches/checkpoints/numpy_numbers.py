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

import numpy
import torch
from omegaconf import DictConfig, OmegaConf

from ...errors import Mistake

MODULES = "numpy.core.multiarray", "numpy._core.multiarray"  # NumPy 1 and 2


class NumberType:
    """Stands for ``numpy.dtype``: a kind of numbers with its size in bytes, and their byte order."""

    __slots__ = ("code", "order")

    def __init__(self, code: object, *_: object):
        if type(code) is not str or not re.fullmatch(r"[biufc]\d{1,2}", code, re.ASCII):
            raise Mistake("it holds NumPy's data of another kind than numbers")
        self.code, self.order = code, "="

    def __setstate__(self, state: object) -> None:
        numbers = type(state) is tuple and state[2:5] == (None, None, None)  # no fields of a record
        if not numbers or type(state[1]) is not str or state[1] not in ("<", ">", "|", "="):
            raise Mistake("it holds NumPy's data of another kind than numbers")
        self.order = state[1]

    def dtype(self) -> numpy.dtype:
        return numpy.dtype(self.code).newbyteorder(self.order)


class Array:
    """Stands for ``numpy.ndarray``: the array of numbers that its state describes."""

    __slots__ = ("numbers",)

    def __init__(self, *arguments: object):
        if arguments:
            raise Mistake("it holds a call of numpy.ndarray, which is not run")
        self.numbers = numpy.empty(0)

    def __setstate__(self, state: object) -> None:
        if type(state) is not tuple or len(state) != 5 or type(state[1]) is not tuple:
            raise Mistake("it holds a NumPy array of unknown layout")
        _, shape, kind, fortran, data = state
        if not all(type(size) is int and size >= 0 for size in shape):
            raise Mistake("it holds a NumPy array of unknown shape")
        numbers = read_numbers(kind, data, math.prod(shape))
        self.numbers = numbers.reshape(shape, order="F" if fortran is True else "C")


def read_numbers(kind: object, data: object, count: int) -> numpy.ndarray:
    if type(kind) is not NumberType or type(data) is not bytes:
        raise Mistake("it holds NumPy's data of another kind than numbers")
    dtype = kind.dtype()
    if len(data) != count * dtype.itemsize:
        raise Mistake(f"it holds {len(data)} bytes for {count} NumPy numbers of {dtype.itemsize} bytes")
    return numpy.frombuffer(bytearray(data), dtype) if data else numpy.empty(0, dtype)


def empty_array(kind: object, *_: object) -> Array:
    """Stands for NumPy's ``_reconstruct``: the array gets its numbers with its state."""
    if kind is not Array:
        raise Mistake("it holds a NumPy array of unknown type")
    return Array()


def number(kind: object, data: object) -> numpy.number | numpy.bool_:
    """Stands for NumPy's ``scalar``."""
    return read_numbers(kind, data, 1)[0]


def no_bytes() -> bytes:
    """Stands for ``bytes``: an array without numbers has none."""
    return b""


STAND_INS = [
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
    names = {name for _, name in STAND_INS}
    hidden = [given for given in torch.serialization.get_safe_globals() if full_path(given) in names]
    change_allowed(hidden, STAND_INS)
    try:
        yield
    finally:
        change_allowed(STAND_INS, hidden)


def change_allowed(remove: list, add: list) -> None:
    kept = [given for given in torch.serialization.get_safe_globals() if given not in remove]
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([*kept, *add])


def full_path(given: object) -> str:
    return given[1] if isinstance(given, tuple) else f"{given.__module__}.{given.__qualname__}"


def without_stand_ins(content: object, seen: dict | None = None) -> object:
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
    if isinstance(options, (Array, NumberType)):
        raise Mistake("it holds an option that is an array")
    refuse_code(options)
    if isinstance(options, (dict, list, tuple, set, frozenset)):
        for part in itertools.chain(*options.items()) if isinstance(options, dict) else options:
            refuse_objects(part)


def refuse_code(content: object) -> None:
    if callable(content) or isinstance(content, torch.serialization.StorageType):
        raise Mistake(f"it holds {getattr(content, '__name__', 'a type')}, which is neither a tensor nor an option")
