"""Linear cross attention in generation: each token reads the memory of its source sentence."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn.functional import linear

from ...generation.loops import Features, View
from ...mixers.features import row_map_of
from ...modules import LinearAttention
from ...ops.native import loop, takes, threads


class SourceStep(Features):
    """The arguments of the loop."""

    _fields_ = (
        [("q", View)]
        + [(name, ctypes.c_void_p) for name in ("memory", "sums", "y")]
        + [(name, ctypes.c_int64) for name in ("beam", "rows", "heads", "values", "threads")]
        + [("eps", ctypes.c_double)]
    )


class SourceReader:
    """Reads the sources of R rows, whose memories are in fairseq's incremental state; the first token puts them there."""

    def __init__(self, attention: LinearAttention, incremental_state: dict, encoder_out: dict):
        self.attention, self.incremental_state = attention, incremental_state
        mask = encoder_out["encoder_padding_mask"]
        self.given = encoder_out["encoder_out"][0], mask[0] if mask else None  # for the first token
        self.in_loop = takes(attention.q_proj.weight.detach())
        self.arguments = a = SourceStep(heads=attention.num_heads, values=attention.head_dim, eps=attention.feature_map.eps)
        a.describe(attention.feature_map, row_map_of(attention.feature_map, attention.feature_norm))
        if self.in_loop:
            self.loop, self.here = loop("source_step", attention.q_proj.weight.dtype), ctypes.byref(a)

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x (R,C) to y (R,C)."""
        attention, a = self.attention, self.arguments
        source = attention._get_input_buffer(self.incremental_state)
        if source is None or not (self.in_loop and a.of_projection):
            y, _ = attention(x.unsqueeze(0), *self.given, self.incremental_state)
            self.given = None, None
            return y.squeeze(0)
        q, memory, y = linear(x, attention.q_proj.weight, attention.q_proj.bias), source.memory.contiguous(), torch.empty_like(x)
        sums = None if source.normaliser is None else source.normaliser.contiguous()
        a.q.data, a.q.row, a.q.head = q.data_ptr(), q.shape[1], a.input
        a.memory, a.sums, a.y = memory.data_ptr(), None if sums is None else sums.data_ptr(), y.data_ptr()
        a.rows, a.beam, a.threads = len(x), source.beam, threads(len(x) * memory[0].numel())
        self.loop(self.here)
        return linear(y, attention.out_proj.weight, attention.out_proj.bias)

    def reorder(self, order: Tensor) -> None:
        """Gives row i the source of row ``order[i]``."""
        self.attention.reorder_incremental_state(self.incremental_state, order)

    def states(self) -> list:
        """Nothing: fairseq's incremental state has the memories."""
        return []
