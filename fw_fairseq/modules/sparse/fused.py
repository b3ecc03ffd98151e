"""Sparse layers of generation on a CPU: one call of a compiled loop for all projections of a layer, and one for its feed-forward
part. What does not change from token to token is prepared once."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn

from ...ops import native
from .feed_forward import RecurrentUnits, SparseFeedForward
from .gathered import RELU, few_rows, takes, threads
from .projections import Convolutions, Multiplicative


class Part(ctypes.Structure):
    """One part of the projections."""

    _fields_ = (("weight", ctypes.c_void_p), ("size", ctypes.c_int64), ("sides", ctypes.c_int64))


class ProjectionsStep(ctypes.Structure):
    """The arguments of the loop."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("x", "gains", "weight", "bias", "out_bias", "before", "y")]
        + [("parts", ctypes.POINTER(Part))]
        + [(name, ctypes.c_int64) for name in ("count", "rows", "width", "modules", "outputs", "threads")]
    )


class FusedProjections:
    """Queries, keys and values of one token of each row."""

    def __init__(self, dense: Multiplicative, heads: Convolutions) -> None:
        self.modules, self.width, self.outputs = (dense, heads), heads.width, heads.out_features  # whose memory the loop reads
        parts = [
            Part(w.data_ptr(), size, w.shape[1] if w.dim() == 4 else 0)
            for w, size in zip(heads.weights.values(), heads.parts.values())
        ]
        self.parts = (Part * len(parts))(*parts)
        self.arguments = a = ProjectionsStep(parts=self.parts, count=len(parts), width=heads.width, modules=heads.count)
        a.gains, a.weight, a.bias = (part.data_ptr() for part in (dense.gains, dense.weight, dense.bias))
        a.out_bias, a.outputs = None if heads.bias is None else heads.bias.data_ptr(), heads.out_features
        a.threads = threads(sum(w.numel() for w in heads.weights.values()) // 3)
        self.loop, self.here = native.loop("project", dense.weight.dtype), ctypes.byref(a)

    @staticmethod
    def fits(dense: nn.Module, heads: nn.Module) -> bool:
        """Whether there is a loop for these modules."""
        known = isinstance(dense, Multiplicative) and isinstance(heads, Convolutions)
        return known and takes(*dense.parameters(), *heads.parameters())

    def __call__(self, x: Tensor, before: Tensor) -> Tensor:
        """Maps x (R,C) to the parts side by side, (R,O), and makes ``before`` (R,2C) what the next token has before it."""
        a, x, y = self.arguments, x.contiguous(), x.new_empty(len(x), self.outputs)
        a.x, a.y, a.before, a.rows = x.data_ptr(), y.data_ptr(), before.data_ptr(), len(x)
        self.loop(self.here)
        return y


class NormArguments(ctypes.Structure):
    """A norm; without weights there is none."""

    _fields_ = (("weight", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("eps", ctypes.c_double))


class LoopArguments(ctypes.Structure):
    """The arguments of the loop."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in ("x", "inner", "outer", "controller_bias", "in_", "out", "bias")]
        + [(name, ctypes.c_void_p) for name in ("down", "down_bias", "gates", "gates_bias", "up", "up_bias", "cell", "y")]
        + [("norm", NormArguments), ("recurrent_norm", NormArguments)]
        + [(name, ctypes.c_int64) for name in ("rows", "width", "rank", "units", "block", "recurrent", "threads")]
    )


def norm_arguments(norm: nn.LayerNorm) -> NormArguments:
    """The norm's numbers."""
    return NormArguments(norm.weight.data_ptr(), norm.bias.data_ptr(), norm.eps)


class FusedFeedForward:
    """A sparse feed-forward layer, the norm before it, and the recurrent units beside it."""

    def __init__(self, layer: SparseFeedForward, norm: nn.LayerNorm | None, units: RecurrentUnits | None) -> None:
        self.modules, self.block = (layer, norm, units), layer.block  # whose memory the loop reads
        self.arguments = a = LoopArguments(block=layer.block, width=layer.weight_in.shape[1], units=len(layer.weight_in))
        a.rank, a.threads = len(layer.controller_in), threads(layer.controller_in.numel() + layer.controller_out.numel())
        a.inner, a.outer, a.controller_bias = (
            part.data_ptr() for part in (layer.controller_in, layer.controller_out, layer.controller_bias)
        )
        a.in_, a.out, a.bias = (part.data_ptr() for part in (layer.weight_in, layer.weight_out, layer.bias))
        if norm is not None:
            a.norm = norm_arguments(norm)
        if units is not None:
            a.recurrent, a.recurrent_norm = units.units, norm_arguments(units.norm)
            for name in ("down", "gates", "up"):
                linear = getattr(units, name)
                setattr(a, name, linear.weight.data_ptr())
                setattr(a, f"{name}_bias", linear.bias.data_ptr())
        self.loop, self.here = native.loop("feed", layer.weight_in.dtype), ctypes.byref(a)

    @staticmethod
    def fits(layer: nn.Module, norm: nn.Module | None, units: RecurrentUnits | None) -> bool:
        """Whether there is a loop for these modules."""
        if not isinstance(layer, SparseFeedForward) or layer.activation not in RELU or type(norm) not in (nn.LayerNorm, type(None)):
            return False
        parts = [part for module in (layer, norm, units) if module is not None for part in module.parameters()]
        return takes(*parts)

    def takes(self, rows: int) -> bool:
        """Whether so few rows read the chosen units only."""
        return few_rows(rows, self.block)

    def __call__(self, x: Tensor, cell: Tensor | None) -> Tensor:
        """Maps x (R,C) to what the part adds to it, and changes the cell (R,units) in place."""
        a, x, y = self.arguments, x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        a.x, a.y, a.rows, a.cell = x.data_ptr(), y.data_ptr(), len(x), None if cell is None else cell.data_ptr()
        self.loop(self.here)
        return y
