"""The step of a memory as one compiled loop, ``ops/native/decode.cpp``: feature maps, decay, erase, write and read, in one call."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ..feature_maps import NORMS, ROW_MAPS, RowMap
from ..mixers import FastWeight
from ..ops.inputs import READ_AND_ERASE
from ..ops.native import loop, threads

_, WRITE, KEYS, KEYS_READ = range(4)  # in the order of Normaliser there
VIEWS = ("q", "k", "v", "f", "z", "e", "w", "u", "a", "p")
POINTERS = ("memory", "y", "source", "order", "factor_keys", "factor_values", "places")
SIZES = ("tokens", "room", "rows", "heads", "values", "decay_of_keys", "erase_of_keys", "normaliser", "threads")


class View(ctypes.Structure):
    """A tensor (R,H) or (R,H,X)."""

    _fields_ = (("data", ctypes.c_void_p), ("row", ctypes.c_int64), ("head", ctypes.c_int64))

    def show(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Points at x, (R,H,1) or (R,H,1,X), in this dtype and with channels side by side; returns what must live meanwhile."""
        x = x if x.dtype == dtype else x.to(dtype)
        self.row, self.head, *_, channel = x.stride()
        if channel != 1 and x.shape[-1] != 1:
            x = x.contiguous()
            self.row, self.head, *_ = x.stride()
        self.data = x.data_ptr()
        return x


class Features(ctypes.Structure):
    """How the loop makes features of the rows that it is given."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("input", "keys", "map", "nu", "norm"))

    def maps(self, row_map: RowMap | None, keys: int) -> bool:
        """Fills in the numbers for rows of features, or for rows of which this map makes features. Returns whether it does."""
        self.input = self.keys = keys
        if row_map is None or ROW_MAPS[row_map.name].number is None:
            return False
        self.map, self.norm, self.nu = ROW_MAPS[row_map.name].number, NORMS[row_map.norm].number, row_map.nu
        return True


class MemoryStep(Features):
    """The arguments of the loop."""

    _fields_ = (
        *((name, View) for name in VIEWS),
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in SIZES),
        *((name, ctypes.c_double) for name in ("eps", "scale")),
    )


class MemoryLoop:
    """Writes and reads one token of each row. ``maps_rows``: q and k are rows, of which the loop makes features."""

    def __init__(self, mixer: FastWeight, row_map: RowMap | None, like: Tensor) -> None:
        self.arguments = s = MemoryStep(heads=mixer.num_heads, values=mixer.head_dim, eps=mixer.feature_map.eps, scale=1)
        self.maps_rows = s.maps(row_map, mixer.feature_map.out_dim)
        if mixer.attention_norm:
            of_keys = KEYS if mixer.attention_norm_of == READ_AND_ERASE else KEYS_READ
            s.normaliser = WRITE if mixer.rule.normaliser == "write" else of_keys
        self.views = [getattr(s, name) for name in VIEWS]
        self.dtype, self.loop, self.here = like.dtype, loop("memory_step", like.dtype), ctypes.byref(s)

    def __call__(self, memory: Any, *operands: Tensor | None) -> Tensor:
        """Changes a ``Memory``. Takes what VIEWS names, (R,H,1) or (R,H,1,X), where the last ones may be left out, and returns what
        q reads, (R,H,1,V)."""
        s, shown = self.arguments, []
        for view, operand in zip(self.views, operands):
            if operand is None:
                view.data = None
            else:
                shown.append(view.show(operand, self.dtype))
        q, f, e = shown[0], operands[3], operands[5]
        rows, heads, _, s.input = q.shape
        s.decay_of_keys, s.erase_of_keys = f is not None and f.dim() == 4, e is not None and e.dim() == 4
        y = q.new_empty(rows, heads, 1, s.values)
        s.y = y.data_ptr()
        if s.rows != rows:
            s.rows, s.threads = rows, threads(rows * heads * s.keys * memory.columns)
        factors = memory.factors
        if factors is None:
            (source, order), s.factor_keys = memory.turn(), None
            s.source, s.memory, s.order = source.data_ptr(), memory.memory.data_ptr(), None if order is None else order.data_ptr()
        else:
            s.tokens, s.room = factors.count, factors.room()
            s.factor_keys, s.factor_values, s.places = (x.data_ptr() for x in (factors.keys, factors.values, factors.places))
        self.loop(self.here)
        if factors is not None:
            memory.grow(factors)
        return y


def step(memory: Tensor, *operands: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns what q reads, (R,H,1,V), and the memory (R,H,K,V) after a token, without a mixer. operands: as of ``MemoryLoop``, and
    q and k are features. The caller makes sure that ``takes`` is true of all of them and that nothing needs a gradient."""
    memory, after = memory.contiguous(), torch.empty_like(memory, memory_format=torch.contiguous_format)
    rows, heads, keys, values = memory.shape
    s = MemoryStep(rows=rows, heads=heads, input=keys, keys=keys, values=values, scale=1, threads=threads(memory.numel()))
    shown = [getattr(s, name).show(x, memory.dtype) for name, x in zip(VIEWS, operands) if x is not None]
    f, e = operands[3], operands[5]
    s.decay_of_keys, s.erase_of_keys = f is not None and f.dim() == 4, e is not None and e.dim() == 4
    y = memory.new_empty(rows, heads, 1, values)
    s.source, s.memory, s.y = memory.data_ptr(), after.data_ptr(), y.data_ptr()
    loop("memory_step", memory.dtype)(ctypes.byref(s))
    del shown  # which lived until here
    return y, after
