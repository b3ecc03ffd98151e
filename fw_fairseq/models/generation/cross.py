"""Linear cross attention in generation: each token reads the memory of its source sentence."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from ...feature_maps import AS_IS
from ...generation.base import function_of
from ...generation.memory_loop import Features, View
from ...mixers.parts.features import row_map_of
from ...mixers.parts.source import Source
from ...modules import LinearAttention
from ...ops.kernels import step as kernel
from ...ops.kernels.launch import has_kernels, why_no_map, why_not_run
from ...ops.native import loop, takes, threads


class SourceStep(Features):
    """The arguments of the compiled loop."""

    _fields_ = (
        ("q", View),
        *((name, ctypes.c_void_p) for name in ("memory", "sums", "y")),
        *((name, ctypes.c_int64) for name in ("beam", "rows", "heads", "values", "threads")),
        ("eps", ctypes.c_double),
    )


class SourceReader:
    """Reads the sources of R rows, whose memories are in fairseq's incremental state; the first token puts them there."""

    def __init__(self, attention: LinearAttention, incremental_state: dict, encoder_out: dict) -> None:
        self.attention, self.incremental_state = attention, incremental_state
        mask, phi, weight = encoder_out["encoder_padding_mask"], attention.feature_map, attention.q_proj.weight
        self.given = encoder_out["encoder_out"][0], mask[0] if mask else None  # for the first token
        self.q_proj, self.out_proj = function_of(attention.q_proj), function_of(attention.out_proj)
        self.arguments = a = SourceStep(heads=attention.num_heads, values=attention.head_dim, eps=phi.eps)
        maps_rows = a.maps(row_map_of(phi, attention.feature_norm), phi.out_dim)
        self.loop = loop("source_step", weight.dtype) if maps_rows and takes(weight.detach()) else None

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x (R,C) to y (R,C)."""
        attention, a = self.attention, self.arguments
        source = attention._get_input_buffer(self.incremental_state)
        if source is None or self.loop is None:
            y, _ = attention(x.unsqueeze(0), *self.given, self.incremental_state)
            self.given = None, None
            return y.squeeze(0)
        q = attention.feature_map.linear(self.q_proj(x).view(len(x), attention.num_heads, 1, -1))
        memory, y = source.memory.contiguous(), torch.empty_like(x)
        sums = None if source.normaliser is None else source.normaliser.contiguous()
        q, a.input = a.q.show(q, x.dtype), q.shape[-1]
        a.memory, a.sums, a.y = memory.data_ptr(), None if sums is None else sums.data_ptr(), y.data_ptr()
        a.rows, a.beam, a.threads = len(x), source.beam, threads(len(x) * memory[0].numel())
        self.loop(ctypes.byref(a))
        return self.out_proj(y)

    def reorder(self, order: Tensor) -> None:
        """Gives row i the source of row ``order[i]``."""
        self.attention.reorder_incremental_state(self.incremental_state, order)

    def state(self) -> None:
        """Nothing: fairseq's incremental state has the memories."""


class KernelSource:
    """The memories (S,H,K,V) of S sentences on a GPU, in fp32, which R rows read where they lie, through an index."""

    def __init__(self, attention: LinearAttention, state: Source | None, encoder_out: dict) -> None:
        self.attention = attention
        self.given: Any = (state, encoder_out)
        self.order: Any = None  # (R)
        self.q_proj, self.out_proj = function_of(attention.q_proj), function_of(attention.out_proj)
        row_map = row_map_of(attention.feature_map, attention.feature_norm)
        self.row_map = None if row_map is None or why_no_map(row_map) else row_map

    @staticmethod
    def can_read(attention: nn.Module) -> bool:
        """Whether the kernel reads what this attention keeps of a source."""
        weight = next(attention.parameters())
        if not (type(attention) is LinearAttention and attention.source is None and has_kernels(weight)):
            return False
        return attention.feature_map.out_dim <= kernel.LARGEST_KEY and why_not_run(weight) is None

    def start(self, rows: int) -> None:
        """Makes the buffers from the state, or else from the encoder's output, which is then let go."""
        (source, encoder_out), self.given = self.given, None
        if source is None:
            mask = encoder_out["encoder_padding_mask"][0] if encoder_out["encoder_padding_mask"] else None
            source = self.attention.summarise(encoder_out["encoder_out"][0], mask)
        self.memory = source.memory.contiguous()
        self.sums = None if source.normaliser is None else source.normaliser.contiguous()
        self.beam = rows // len(self.memory)
        self.order = torch.arange(len(self.memory), device=self.memory.device).repeat_interleave(self.beam)
        self.y = self.attention.q_proj.weight.new_empty(rows, *self.memory.shape[1::2])

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x (R,C) to y (R,C)."""
        attention, row_map, rows = self.attention, self.row_map, len(x)
        if self.order is None:
            self.start(rows)
        q = self.q_proj(x)
        if row_map is None:
            q, row_map = attention.features(q.unsqueeze(0))[0].squeeze(2), AS_IS
        else:
            q = attention.feature_map.linear(q.view(rows, attention.num_heads, 1, -1)).squeeze(2)
        kernel.read(q.contiguous(), self.memory, self.sums, self.order, attention.feature_map.eps, row_map, self.y)
        return self.out_proj(self.y.view(rows, -1))

    def reorder(self, order: Tensor) -> None:
        """Gives row i the source of row ``order[i]``."""
        if self.order is None:
            return
        if len(order) == len(self.order):
            self.order.copy_(self.order.index_select(0, order))
        else:
            self.order = self.order.index_select(0, order)
            self.y = self.y.new_empty(len(order), *self.y.shape[1:])

    def state(self) -> Source | None:
        """The memories of the rows; rows of one sentence share one while they stand side by side."""
        if self.order is None:
            return None
        groups = self.order.view(-1, self.beam) if len(self.order) % self.beam == 0 else self.order[:, None]
        if not groups.eq(groups[:, :1]).all():
            groups = self.order[:, None]
        return Source(self.memory, self.sums).index_select(groups[:, 0])._replace(beam=groups.shape[1])
