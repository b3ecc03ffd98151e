"""The step of a memory as one compiled loop, ``ops/native/decode.cpp``: feature maps, decay, erase, write and read, in one call.

Beam search gives the order of the hypotheses, in which the next token's pass over the memory reads the rows. While there are few
tokens, the memory is kept as their factors: the hypotheses share those, so that a new order moves one number for each token.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..feature_maps import RowMap
from ..mixers import FastWeight
from ..ops import FastWeightState
from ..ops.factored import Factors
from ..ops.native import loop, takes, threads
from .loops import Features, View
from .memory import Memory, put_out

_, WRITE, KEYS, KEYS_READ = range(4)  # in the order of Normaliser there
VIEWS = ("q", "k", "v", "f", "z", "e", "w", "u", "a", "p")
POINTERS = ("memory", "y", "source", "order", "factor_keys", "factor_values", "places")
SIZES = ("tokens", "room", "rows", "heads", "values", "decay_of_keys", "erase_of_keys", "normaliser", "threads")


class MemoryStep(Features):
    """The arguments of the loop."""

    _fields_ = (
        [(name, View) for name in VIEWS]
        + [(name, ctypes.c_void_p) for name in POINTERS]
        + [(name, ctypes.c_int64) for name in SIZES]
        + [(name, ctypes.c_double) for name in ("eps", "scale")]
    )


class FactorBuffers:
    """The factors of a few tokens, with room for as many as take less space than the memory."""

    def __init__(self, rows: int, heads: int, keys: int, columns: int, shared: bool, like: Tensor):
        self.shared, self.count = shared, 0
        room = -(-keys * columns // (keys + columns)) - 1
        self.keys, self.values = (like.new_empty(rows, heads, room, width) for width in (keys, columns))
        self.places = torch.arange(rows, device=like.device)[:, None].repeat(1, room)

    def room(self) -> int:
        """How many tokens fit in."""
        return self.keys.shape[2]

    def reorder(self, order: Tensor) -> None:
        """Gives hypothesis i the tokens of ``order[i]``. Those that decay are copied: each hypothesis has its own decay."""
        self.places = self.places.index_select(0, order)
        if self.shared and len(order) <= len(self.keys):
            return
        keys, values = self.gathered()
        self.keys, self.values = (part.new_empty(len(order), *part.shape[1:]) for part in (self.keys, self.values))
        self.keys[:, :, : self.count], self.values[:, :, : self.count] = keys, values
        self.places = torch.arange(len(order), device=order.device)[:, None].repeat(1, self.room())

    def gathered(self) -> tuple[Tensor, Tensor]:
        """The factors of each hypothesis, (R,H,S,K) and (R,H,S,V)."""
        rows, tokens = self.places[:, : self.count], torch.arange(self.count, device=self.places.device)
        return tuple(part[rows, :, tokens].transpose(1, 2) for part in (self.keys, self.values))


class CompiledMemory(Memory):
    """A memory whose step is compiled."""

    @staticmethod
    def fits(mixer: FastWeight) -> bool:
        """Whether the memory can be changed in place, and there is a loop for its type of number."""
        return Memory.fits(mixer) and takes(next(mixer.in_proj.parameters()).detach())

    @staticmethod
    def takes(mixer: FastWeight, state: FastWeightState | None, rows: int) -> bool:
        """Whether the buffers can hold the state: the factors of a first token can, and every matrix."""
        return state is None or Memory.takes(mixer, state, rows)

    def start(self, state: FastWeightState | None, x: Tensor) -> None:
        """Makes the buffers, for the rows of x."""
        self.factors: FactorBuffers | None = None
        axes = {gate.axis for gate in self.rule.gates.values()}
        decays = self.rule.sample[:2] != (None, None)
        sizes = len(x), self.heads, self.mixer.feature_map.out_dim, self.columns
        whole_sums = self.mixer.attention_norm and self.rule.normaliser == "keys" and "K" in axes
        if state is None and self.rule.one_step and not whole_sums:
            self.factors = FactorBuffers(*sizes, not decays, x)
        if self.factors is None or not self.factors.room():
            self.factors = None
            super().start(state, x)
        else:
            self.prepare(*sizes, x)

    def take(self, memory: Tensor) -> None:
        """Makes ``memory`` the buffer."""
        super().take(memory)
        self.order: Tensor | None = None
        self.prepare(*memory.shape, memory)

    def prepare(self, rows: int, heads: int, keys: int, columns: int, like: Tensor) -> None:
        """Fills in what does not change from token to token."""
        self.sizes, self.like = (heads, keys, columns), like.new_empty(())
        self.as_returned: bool | None = None  # whether the loop reads coefficients as the rule returns them
        mixer, query_size = self.mixer, self.mixer.sizes["q"]
        total, numbers = mixer.in_proj.out_features, rows * heads * keys * columns
        self.arguments = a = MemoryStep(rows=rows, heads=heads, values=self.value_dim, threads=threads(numbers))
        a.eps, a.scale = self.eps, mixer.read_scale
        a.describe(mixer.feature_map, self.map_of_loop())
        if mixer.attention_norm:
            a.normaliser = WRITE if self.rule.normaliser == "write" else KEYS if self.divides_erase else KEYS_READ
        self.views = q, k, v, *_ = [getattr(a, name) for name in VIEWS]
        q.row = k.row = total if a.of_projection else heads * keys
        q.head, k.head, v.row, v.head = a.input, a.input, total, self.value_dim
        self.loop, self.here = loop("memory_step", like.dtype), ctypes.byref(a)
        self.gate_start = sum(self.parts[:2])
        self.starts = [part * like.element_size() for part in (0, query_size, 2 * query_size)]
        if not self.arguments.maps_rows:
            self.qk = like.new_empty(2, rows, heads, 1, keys)

    def map_of_loop(self) -> RowMap | None:
        """The map that the loop may apply to rows; None: they are features."""
        return self.mixer.row_map

    def of_projected(self, parts: Tensor) -> Tensor:
        """Writes and reads what the input projection makes of a token: (R,P) -> y (R,C)."""
        mixer, a, (q, k, v, *rest) = self.mixer, self.arguments, self.views
        y, start = parts.new_empty(len(parts), self.heads * self.value_dim), parts.data_ptr()
        q.data, k.data, v.data = (start + part for part in self.starts)
        if not a.of_projection:
            queries, keys = self.mapped(parts[:, : self.parts[0]])
            q.data, k.data = queries.data_ptr(), keys.data_ptr()
        opened = parts[:, self.gate_start :].sigmoid().split(self.gates, -1) if self.gates else ()
        coefficients = self.rule.coefficients(**{name: self.shaped(part) for name, part in zip(self.rule.gates, opened)})
        if self.as_returned is None:  # the first token tells for all
            self.as_returned = all(part is self.readable(part) for part in coefficients)
        if not self.as_returned:
            coefficients = type(coefficients)(*map(self.readable, coefficients))
        for view, part in zip(rest, coefficients):
            view.show(part)
        a.decay_of_keys, a.y = coefficients.f is not None and coefficients.f.dim() == 4, y.data_ptr()
        self.run(a)
        return put_out(mixer, y)

    def readable(self, part: Tensor | None) -> Tensor | None:
        """As the loop reads it: of one type with the memory, and with channels side by side."""
        if part is None:
            return None
        part = part if part.dtype == self.like.dtype else part.to(self.like.dtype)
        return part if part.stride(-1) == 1 or part.shape[-1] == 1 else part.contiguous()

    def mapped(self, qk: Tensor) -> Tensor:
        """Maps the projections of queries and keys to what the loop reads, (2,R,H,1,X): features, or rows that it maps."""
        if not self.arguments.maps_rows:
            return self.features(qk)
        return self.mixer.feature_map.linear(self.by_head(qk)).contiguous()

    def run(self, a: MemoryStep) -> None:
        """Calls the loop on the factors or the matrix."""
        if self.factors is not None:
            parts, a.tokens, a.room = self.factors, self.factors.count, self.factors.room()
            a.factor_keys, a.factor_values, a.places = (part.data_ptr() for part in (parts.keys, parts.values, parts.places))
            self.loop(self.here)
            parts.count += 1
            if parts.count == parts.room():
                self.take(self.product())
            return
        source, order = self.memory, self.order
        if order is not None:
            spare, self.order = self.spare, None
            if spare is None or len(spare) != len(order):
                spare = source.new_empty(len(order), *source.shape[1:])
            self.memory, self.spare = spare, source
        a.source, a.memory, a.order = source.data_ptr(), self.memory.data_ptr(), None if order is None else order.data_ptr()
        self.loop(self.here)

    def product(self) -> Tensor:
        """The matrix that the factors stand for."""
        keys, values = self.factors.gathered()
        self.factors = None
        return keys.mT @ values

    def reorder(self, order: Tensor) -> None:
        """Gives row i the memory of row ``order[i]``. A matrix is read in this order at the next token."""
        if self.factors is not None:
            self.factors.reorder(order)
        else:
            self.order = order.contiguous() if self.order is None else self.order.index_select(0, order)
        if len(order) != self.arguments.rows:
            self.prepare(len(order), *self.sizes, self.like)

    def state(self) -> FastWeightState:
        """The state after the last token."""
        if self.factors is not None:
            keys, values = self.factors.gathered()
            memory, sums = Factors(keys, values[..., : self.value_dim]), keys.mT @ values[..., -1:]
            return FastWeightState(memory, sums.squeeze(-1) if self.mixer.attention_norm else None)
        if self.order is not None:
            self.memory, self.order = self.memory.index_select(0, self.order), None
        return super().state()
