"""The step of a memory as one compiled loop, ``native/decode.cpp``: feature maps, decay, erase, write and read, in one call."""

from __future__ import annotations

import ctypes

from torch import Tensor
from torch.nn.functional import linear

from ..feature_maps import FeatureMap
from ..mixers import FastWeight
from ..native import loop, takes, threads
from .memory import Memory

MAP_NAMES, NORM_NAMES = ("identity", "elu", "relu", "dpfp"), ("none", "sum", "l2")  # in the order of Map and Norm there
_, WRITE, KEYS, KEYS_READ = range(4)  # in the order of Normaliser there
VIEWS = ("q", "k", "v", "f", "z", "e", "w")
SIZES = ("rows", "heads", "input", "keys", "values", "map", "nu", "norm", "decay_of_keys", "normaliser", "threads")


class View(ctypes.Structure):
    """A tensor (R,H) or (R,H,X)."""

    _fields_ = (("data", ctypes.c_void_p), ("row", ctypes.c_int64), ("head", ctypes.c_int64))

    def show(self, x: Tensor | None) -> None:
        """Points at x, (R,H,1) or (R,H,1,X)."""
        if x is None:
            self.data = None
        else:
            self.data, self.row, self.head = x.data_ptr(), x.stride(0), x.stride(1)


class MemoryStep(ctypes.Structure):
    """The arguments of the loop."""

    _fields_ = (
        [(name, View) for name in VIEWS]
        + [(name, ctypes.c_void_p) for name in ("memory", "y")]
        + [(name, ctypes.c_int64) for name in SIZES]
        + [(name, ctypes.c_double) for name in ("eps", "scale")]
    )


class CompiledMemory(Memory):
    """A memory whose step is compiled."""

    @staticmethod
    def fits(mixer: FastWeight) -> bool:
        """Whether the memory can be changed in place, and there is a loop for its type of number."""
        return Memory.fits(mixer) and takes(mixer.in_proj.weight.detach())

    def take(self, memory: Tensor) -> None:
        """Makes ``memory`` the buffer, and fills in what does not change from token to token."""
        super().take(memory)
        mixer, (rows, heads, keys, _) = self.mixer, memory.shape
        row_map, query_size, total = mixer.row_map, mixer.sizes["q"], mixer.in_proj.out_features
        self.maps_rows = row_map is not None and row_map.name in MAP_NAMES
        self.of_projection = self.maps_rows and type(mixer.feature_map).linear is FeatureMap.linear
        self.arguments = a = MemoryStep(rows=rows, heads=heads, keys=keys, values=self.value_dim, nu=1)
        a.eps, a.scale, a.threads = self.eps, mixer.read_scale, threads(memory.numel())
        if self.maps_rows:
            a.map, a.norm, a.nu = MAP_NAMES.index(row_map.name), NORM_NAMES.index(row_map.norm), row_map.nu
        a.input = query_size // heads if self.of_projection else keys
        if mixer.attention_norm:
            a.normaliser = WRITE if self.rule.normaliser == "write" else KEYS if self.divides_erase else KEYS_READ
        self.views = tuple(getattr(a, name) for name in VIEWS)
        for view, width in zip(self.views, (a.input, a.input, self.value_dim)):
            view.row, view.head = (total if self.of_projection or view is self.views[2] else heads * keys), width
        self.loop, self.here = loop("memory_step", memory.dtype), ctypes.byref(a)
        self.gate_start = sum(self.parts[:2])
        self.starts = [part * memory.element_size() for part in (0, query_size, 2 * query_size)]

    def step(self, x: Tensor) -> Tensor:
        """Writes and reads: x (R,C) -> y (R,C)."""
        mixer, a, (q, k, v, *rest) = self.mixer, self.arguments, self.views
        projected = linear(x, mixer.in_proj.weight, mixer.in_proj.bias)
        y, start = x.new_empty(len(x), self.heads * self.value_dim), projected.data_ptr()
        q.data, k.data, v.data = (start + part for part in self.starts)
        if not self.of_projection:
            queries, keys = self.mapped(projected[:, : self.parts[0]])
            q.data, k.data = queries.data_ptr(), keys.data_ptr()
        opened = projected[:, self.gate_start :].sigmoid().split(self.gates, -1) if self.gates else ()
        coefficients = self.rule.coefficients(**{name: self.shaped(part) for name, part in zip(self.rule.gates, opened)})
        for view, part in zip(rest, coefficients):
            view.show(part)
        a.decay_of_keys = coefficients.f is not None and coefficients.f.dim() == 4
        a.memory, a.y = self.memory.data_ptr(), y.data_ptr()
        self.loop(self.here)
        return linear(y, mixer.out_proj.weight, mixer.out_proj.bias)

    def mapped(self, qk: Tensor) -> Tensor:
        """Maps the projections of queries and keys to what the loop reads, (2,R,H,1,X): features, or rows that it maps."""
        if not self.maps_rows:
            return self.features(qk)
        return self.mixer.feature_map.linear(self.by_head(qk)).contiguous()
