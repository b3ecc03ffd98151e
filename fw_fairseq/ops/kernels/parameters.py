"""Launches that are prepared once: of a later one with tensors of the same layout only the addresses are new.

A kernel takes one structure by value, with a ``View`` (an address and strides) of each tensor, addresses of others, and numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

CODES = {"u8": "Q", "i8": "q", "i4": "i", "f4": "f"}  # numpy's words for numbers in those of ``struct``
MOST = 4096  # things that are kept: programs with ever new sizes begin again at times


def remember(kept: dict, key: Hashable, value: Any) -> Any:
    """The value, which is under ``key`` from now on."""
    if len(kept) >= MOST:
        kept.clear()
    kept[key] = value
    return value


class Structure:
    """A structure in CUDA: ``dtype`` is a numpy dtype with ``align=True``. ``struct`` packs it in a fraction of numpy's time.

    shares: the tensors with a leading dimension over shares of a sum, whose stride is the last of their view.
    """

    def __init__(self, dtype: np.dtype, shares: tuple[str, ...] = ()) -> None:
        self.dtype, self.shares, self.places, codes = dtype, shares, {}, ""
        for name in dtype.names or ():
            self.places[name] = len(codes)
            parts = dtype[name].names
            kinds = [dtype[name]] if parts is None else [dtype[name][part] for part in parts]
            codes += "".join(CODES[kind.str[1:]] for kind in kinds)
        self.length, self.pack = len(codes), struct.Struct(f"@{codes}0q").pack

    def numbers(self, tensors: dict[str, Tensor | None], sizes: dict[str, float]) -> list[float]:
        """All numbers of the structure in their order, with 0 for addresses."""
        numbers: list[float] = [0] * self.length
        for name, size in sizes.items():
            numbers[self.places[name]] = size
        for name, x in tensors.items():
            if x is not None and (parts := self.dtype[name].names):
                strides = (*x.stride()[1:4], x.stride(0)) if name in self.shares else (*x.stride()[:3], 0)
                place, count = self.places[name] + 1, len(parts) - 1
                numbers[place : place + count] = strides[:count]
        return numbers


# ``View`` and ``Params`` in ``cuda/rows.cuh``.
VIEW = np.dtype([("p", "u8"), ("b", "i8"), ("h", "i8"), ("t", "i8"), ("tile", "i8")])
VIEWS = ("q", "k", "v", "f", "e", "w", "y", "dy", "dq", "dk", "dv", "df", "de", "dw", "divisors", "ddivisors")
SHARES = ("dq", "dk", "df", "de", "dw")  # outputs that each tile of V has a share of, along a first dimension
POINTERS = (
    *("memory", "final", "borders", "dfinal", "dmemory", "sums", "final_sums", "dfinal_sums", "dsums", "sums_borders"),
    *("scales", "adjoints", "adjoint_sums"),
)
SIZES = (*((name, "i4") for name in (*"HTKV", "part")), ("eps", "f4"), ("least", "f4"))
PARAMS = np.dtype([*((name, VIEW) for name in VIEWS), *((name, "u8") for name in POINTERS), *SIZES], align=True)
OF_ROWS = Structure(PARAMS, SHARES)
ROWS = ("q", "k", "v", "y", "dy", "dq", "dk", "dv")
DIVIDED_VIEWS = ("y", "dy", "dx", "divisors", "ddivisors")  # ``View`` and ``Params`` in ``cuda/divided.cu``
DIVIDED_SIZES = (*((name, "i4") for name in "HTV"), ("eps", "f4"), ("least", "f4"))
DIVIDED_VIEW = np.dtype([("p", "u8"), ("b", "i8"), ("h", "i8"), ("t", "i8")], align=True)  # so that the whole is, too
DIVIDED = np.dtype([*((name, DIVIDED_VIEW) for name in DIVIDED_VIEWS), *DIVIDED_SIZES], align=True)
OF_DIVIDED = Structure(DIVIDED)


class Kernel(NamedTuple):
    """A kernel and how it is started, for tensors of one layout."""

    source: str
    name: str
    defines: dict[str, Any]
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int  # bytes
    sizes: dict[str, float]  # the numbers of its structure
