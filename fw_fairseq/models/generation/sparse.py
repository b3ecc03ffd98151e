"""Sparse layers in generation: what their queries, keys and values read, and the recurrent units beside their feed-forward part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...generation.base import SoftmaxStepper, check_rows
from ...generation.layer import AttentionStep, FeedForwardStep
from ...mixers.sru import SruState
from ...modules import FastWeightDecoderLayer
from ...modules.sparse import RecentState, SparseAttention, SparseFeedForward
from ...modules.sparse.fused import FusedFeedForward, FusedProjections


def is_sparse_softmax(attention: nn.Module) -> bool:
    """Whether an attention is softmax attention with sparse queries, keys and values."""
    return isinstance(attention, SparseAttention)


def has_sparse_feed_forward(layer: FastWeightDecoderLayer) -> bool:
    """Whether the feed-forward part of a layer is sparse, or has recurrent units beside it."""
    return layer.recurrence is not None or isinstance(layer.fc2, SparseFeedForward)


class SparseSoftmaxStepper(SoftmaxStepper):
    """The softmax attention of sparse queries, keys and values, which has no output projection."""

    reads_projection = True

    def __call__(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        return self.of_projected(self.mixer.in_proj(source))

    def of_projected(self, parts: Tensor) -> Tensor:
        """Maps q, k and v side by side, (R,3C), to y (R,C)."""
        return self.read(*parts.chunk(3, -1))


class SourceStepper:
    """The modules of a token and of the two before it, which sparse queries, keys and values read."""

    def __init__(self, dense: Any, state: RecentState | None) -> None:
        self.dense = dense
        self.before: Any = None if state is None else state.vectors.flatten(1).clone()  # (R,2C), the last token first

    def start(self, x: Tensor) -> Tensor:
        """The vectors of the two tokens before x (R,C); 0 where there were none."""
        if self.before is None:
            self.before = x.new_zeros(len(x), 2 * x.shape[1])
        check_rows(len(x), len(self.before))
        self.before = self.before.contiguous()
        return self.before

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x (R,C) to [p_t, p_{t-1}, p_{t-2}] (R,3C)."""
        source = torch.cat([self.dense(x), self.start(x)], 1)
        self.before = source[:, : self.before.shape[1]]
        return source

    def reorder(self, order: Tensor) -> None:
        """Gives row i the vectors of row ``order[i]``."""
        if self.before is not None:
            self.before = self.before.index_select(0, order)


class CellStepper:
    """The recurrent units beside a feed-forward layer, which change their cell in place."""

    def __init__(self, units: Any, state: SruState | None) -> None:
        self.units, self.cell = units, None if state is None else state.cell.clone()

    def start(self, x: Tensor) -> Tensor:
        """The cell before x (R,C); 0 before the first token."""
        if self.cell is None:
            dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
            self.cell = x.new_zeros(len(x), self.units.units, dtype=dtype)
        check_rows(len(x), len(self.cell))
        return self.cell

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x (R,C) to (R,C)."""
        return self.units.step(x, self.start(x))

    def reorder(self, order: Tensor) -> None:
        """Gives row i the cell of row ``order[i]``."""
        if self.cell is not None:
            self.cell = self.cell.index_select(0, order)


class SparseAttentionStep(AttentionStep):
    """Self-attention with sparse queries, keys and values. state: of what they read."""

    def __init__(self, attention: Any, stepper: Any, norm: nn.Module | None, state: RecentState | None) -> None:
        super().__init__(attention, stepper, norm)
        dense, heads = attention.source.part.dense, getattr(attention, "mixer", attention).in_proj
        self.source = SourceStepper(dense, state)
        self.fused = None
        if stepper.reads_projection and FusedProjections.fits(dense, heads):
            self.fused = FusedProjections(dense, heads)

    def __call__(self, x: Tensor) -> Tensor:
        if self.norm is not None:
            x = self.norm(x)
        if self.fused is not None:
            return self.stepper.of_projected(self.fused(x, self.source.start(x)))
        return self.stepper(x, self.source(x))

    def reorder(self, order: Tensor) -> None:
        super().reorder(order)
        self.source.reorder(order)

    def states(self) -> list[tuple[nn.Module, object]]:
        before = self.source.before
        state = None if before is None else RecentState(before.clone().unflatten(1, (2, -1)))
        return [*super().states(), (self.owner.source, state)]


class SparseFeedForwardStep(FeedForwardStep):
    """A feed-forward part that may be sparse, and the recurrent units beside it. state: of those."""

    def __init__(self, layer: FastWeightDecoderLayer, norm: Any, state: SruState | None) -> None:
        super().__init__(layer.fc1, layer.activation_fn, layer.fc2, norm)
        self.recurrence = layer.recurrence
        units: Any = None if self.recurrence is None else self.recurrence.part
        self.cell = None if units is None else CellStepper(units, state)
        self.fused = FusedFeedForward(layer.fc2, norm, units) if FusedFeedForward.fits(layer.fc2, norm, units) else None

    def __call__(self, x: Tensor) -> Tensor:
        if self.fused is not None and self.fused.takes(len(x)):
            return self.fused(x, None if self.cell is None else self.cell.start(x))
        y = super().__call__(x)
        return y if self.cell is None else y + self.cell(x)

    def reorder(self, order: Tensor) -> None:
        if self.cell is not None:
            self.cell.reorder(order)

    def states(self) -> list[tuple[nn.Module, object]]:
        if self.recurrence is None or self.cell is None or self.cell.cell is None:
            return []
        return [(self.recurrence, SruState(self.cell.cell.clone()))]
