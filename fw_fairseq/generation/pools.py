"""Generation with additive attention and LEAP: their states change in place, in compiled loops (``ops/native/decode.cpp``).

A pool is an aggregate of all past tokens. With a window of n it has the last n - 1 tokens in two parts, which move on together for
all rows: ``front``, aggregates from each of its tokens to its last one, and ``back``, tokens whose aggregate is ``running``.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..mixers import Additive
from ..mixers.additive import PooledState
from ..ops.native import loop, takes
from ..ops.scans.stacks import PoolState, aggregates, joined, nothing, of_aggregates, pack, running, unpack
from .base import InPlaceStepper


class PoolStruct(ctypes.Structure):
    """Pool as the loops see it."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("front", "back", "running")] + [
        (name, ctypes.c_int64) for name in ("windowed", "size", "start", "filled")
    ]


class Pool:
    """The state of one round of pooling."""

    def __init__(self, state: PoolState | None, window: int, shape: tuple[int, int, int], like: Tensor) -> None:
        rows, heads, width = shape
        self.struct = PoolStruct(windowed=window > 0, size=max(0, window - 1))
        empty = nothing(like.new_empty(rows, heads, 0), like.new_empty(rows, heads, 0, width), 1)
        size = self.struct.size
        past = empty.expand(-1, -1, max(1, size), -1) if state is None else pack(*aggregates(state))
        self.running = empty if window else past.contiguous()
        self.front = past.clone(memory_format=torch.contiguous_format) if size else empty[:, :, :0]
        self.back = torch.empty_like(self.front)
        self.place()

    def place(self) -> None:
        """Tells the loop where the parts lie."""
        for name in ("front", "back", "running"):
            setattr(self.struct, name, getattr(self, name).data_ptr())

    def moved_on(self) -> None:
        """The loop may have made the back the next front."""
        if self.struct.front != self.front.data_ptr():
            self.front, self.back = self.back, self.front

    def reorder(self, order: Tensor) -> None:
        """Gives row i what row ``order[i]`` has."""
        self.front, self.back, self.running = (part.index_select(0, order) for part in (self.front, self.back, self.running))
        self.place()

    def state(self) -> PoolState:
        """The state after the last token: the aggregate of all past ones, or one from each token of the window to the last one."""
        if not self.struct.windowed:
            return PoolState(*(part.clone() for part in unpack(self.running)))
        newest = running(self.back[:, :, : self.struct.filled].flip(2))
        rows = joined(newest, self.front[:, :, self.struct.start :].flip(2)).flip(2)
        return of_aggregates(*unpack(rows))


class PooledStep(ctypes.Structure):
    """The arguments of a loop. LEAP reads no x, no parameters and one pool."""

    _fields_ = (
        [
            (name, ctypes.c_void_p)
            for name in ("projected", "x", "query_score", "key_score", "weight", "bias", "y", "first", "second")
        ]
        + [(name, ctypes.c_int64) for name in ("rows", "heads", "width")]
        + [(name, ctypes.c_double) for name in ("eps", "scale")]
    )


class Pools(InPlaceStepper):
    """The states of a layer of additive attention or LEAP for R rows."""

    mixer: Any  # Additive or Leap

    @staticmethod
    def can_hold(mixer: Any) -> bool:
        """Whether there is a loop for the mixer: the published additive attention has a product in its middle."""
        if not all(part is None or type(part) is nn.Linear for part in (mixer.in_proj, mixer.out_proj)):
            return False
        return takes(mixer.in_proj.weight.detach()) and not (isinstance(mixer, Additive) and mixer.published)

    def start(self, state: Any, x: Tensor) -> None:
        mixer, additive = self.mixer, isinstance(self.mixer, Additive)
        states = (None, None) if state is None else state.rounds() if additive else (state,)
        shape = (len(x), mixer.num_heads, mixer.head_dim * (1 if additive else 2))
        self.pools = [Pool(part, mixer.window, shape, x) for part in states[: 1 + additive]]
        self.arguments = a = PooledStep(rows=len(x), heads=mixer.num_heads, width=mixer.head_dim, scale=mixer.head_dim**-0.5)
        a.first = ctypes.addressof(self.pools[0].struct)
        if additive:
            a.second, a.eps = ctypes.addressof(self.pools[1].struct), mixer.norm.eps
            parts = mixer.query_score, mixer.key_score, mixer.norm.weight, mixer.norm.bias
            a.query_score, a.key_score, a.weight, a.bias = (part.data_ptr() for part in parts)
        self.loop, self.here = loop("additive_step" if additive else "leap_step", x.dtype), ctypes.byref(a)

    def step(self, x: Tensor) -> Tensor:
        a, x = self.arguments, x.contiguous()
        projected, y = linear(x, self.mixer.in_proj.weight), torch.empty_like(x)
        a.projected, a.x, a.y = projected.data_ptr(), x.data_ptr(), y.data_ptr()
        self.loop(self.here)
        for pool in self.pools:
            pool.moved_on()
        return y if self.mixer.out_proj is None else linear(y, self.mixer.out_proj.weight)

    def reorder_buffers(self, order: Tensor) -> None:
        self.arguments.rows = len(order)
        for pool in self.pools:
            pool.reorder(order)

    def buffered_state(self) -> PooledState | PoolState:
        states = [pool.state() for pool in self.pools]
        return PooledState.of_rounds(*states) if len(states) == 2 else states[0]
