"""Linear cross attention in generation on a GPU: the sources are summarised once, and every row reads its own through an index."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ...feature_maps import AS_IS
from ...mixers.features import row_map_of
from ...mixers.parts.source import Source
from ...modules import LinearAttention
from ...ops.dispatch import has_kernels
from ...ops.kernels import step as kernel
from ...ops.kernels.launch import why_no_map, why_not_run


class KernelSource:
    """The memories (S,H,K,V) of S sentences, in fp32, which R rows read where they lie."""

    def __init__(self, attention: LinearAttention, state: Source | None, encoder_out: dict):
        self.attention, self.given = attention, (state, encoder_out)
        self.order: Tensor | None = None
        row_map = row_map_of(attention.feature_map, attention.feature_norm)
        self.row_map = None if row_map is None or why_no_map(row_map) else row_map

    @staticmethod
    def fits(attention: nn.Module) -> bool:
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
        attention, rows = self.attention, len(x)
        if self.order is None:
            self.start(rows)
        q = linear(x, attention.q_proj.weight, attention.q_proj.bias).view(rows, attention.num_heads, -1)
        kernel.read(*self.mapped(q), self.y)
        return linear(self.y.view(rows, -1), attention.out_proj.weight, attention.out_proj.bias)

    def mapped(self, q: Tensor) -> tuple:
        """The other arguments of the kernel for the projected queries (R,H,X): rows that it maps, or features."""
        attention, row_map = self.attention, self.row_map
        if row_map is None:
            q, row_map = attention.features(q.flatten(1).unsqueeze(0))[0].squeeze(2), AS_IS
        else:
            q = attention.feature_map.linear(q.unsqueeze(2)).squeeze(2)
        return q.contiguous(), self.memory, self.sums, self.order, attention.feature_map.eps, row_map

    def reorder(self, order: Tensor) -> None:
        """Gives row i the source of row ``order[i]``."""
        if self.order is None:
            return
        if len(order) == len(self.order):
            self.order.copy_(self.order.index_select(0, order))
        else:
            self.order = self.order.index_select(0, order)
            self.y = self.y.new_empty(len(order), *self.y.shape[1:])

    def states(self) -> list[tuple[nn.Module, Source]]:
        """The memories of the rows; rows of one sentence share one while they stand side by side."""
        if self.order is None:
            return []
        groups = self.order.view(-1, self.beam) if len(self.order) % self.beam == 0 else self.order[:, None]
        if not groups.eq(groups[:, :1]).all():
            groups = self.order[:, None]
        source = Source(self.memory, self.sums).index_select(groups[:, 0])
        return [(self.attention, source._replace(beam=groups.shape[1]))]
