"""The parts of a layer add to the residual stream for one token of each row, and keep their states."""

from __future__ import annotations

import torch
from fairseq.utils import get_activation_fn
from torch import Tensor, nn

from ...generation.modules import plain
from ...generation.steppers import check_rows
from ...mixers.sru import SruState
from ...modules import FastWeightDecoderLayer
from ...modules.sparse import RecentState
from ...modules.sparse.fused import FusedFeedForward, FusedProjections
from ...modules.stateful import Incremental
from .kernel_source import KernelSource
from .source import SourceReader
from .steppers import make_stepper

RELU = get_activation_fn("relu")


class SourceStepper:
    """The modules of a token and of the two before it, which sparse queries, keys and values read."""

    def __init__(self, dense: nn.Module, state):
        self.dense = dense
        self.before = None if state is None else state.vectors.flatten(1).clone()  # (R,2C), the last token first

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

    def __init__(self, units: nn.Module, state):
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


def taken(attention: nn.Module, incremental_state: dict):
    """Takes the state of an attention, or of another part, out of fairseq's incremental state."""
    name = attention.state_name if isinstance(attention, Incremental) else "attn_state"
    return incremental_state.pop(attention._get_full_incremental_state_key(name), None)


class AttentionStep:
    """The self-attention of a layer, with what its sparse projections read."""

    def __init__(self, attention: nn.Module, norm: nn.Module, before: bool, incremental_state: dict):
        self.attention, self.norm = attention, plain(norm) if before else None
        self.stepper = make_stepper(attention, taken(attention, incremental_state))
        kept = getattr(attention, "source", None)
        self.source = None if kept is None else SourceStepper(kept.part.dense, taken(kept, incremental_state))
        self.fused = None
        heads = getattr(getattr(attention, "mixer", attention), "in_proj", None)
        if kept is not None and self.stepper.takes_projected and FusedProjections.fits(kept.part.dense, heads):
            self.fused = FusedProjections(kept.part.dense, heads)

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x (R,C) to what the attention adds to it."""
        if self.norm is not None:
            x = self.norm(x)
        if self.fused is not None and self.stepper.ready(len(x)):
            return self.stepper.of_projected(self.fused(x, self.source.start(x)))
        return self.stepper(x) if self.source is None else self.stepper(x, self.source(x))

    def reorder(self, order: Tensor) -> None:
        self.stepper.reorder(order)
        if self.source is not None:
            self.source.reorder(order)

    def states(self) -> list[tuple[nn.Module, object]]:
        """The states after the last token, with the parts that they belong to."""
        found = [(self.attention, self.stepper.state())]
        if self.source is not None and self.source.before is not None:
            found.append((self.attention.source, RecentState(self.source.before.clone().unflatten(1, (2, -1)))))
        return found


class CrossStep:
    """Linear attention to the source."""

    def __init__(self, layer: FastWeightDecoderLayer, incremental_state: dict, encoder_out: dict):
        attention = layer.encoder_attn
        if KernelSource.fits(attention):
            self.reader = KernelSource(attention, taken(attention, incremental_state), encoder_out)
        else:
            self.reader = SourceReader(attention, incremental_state, encoder_out)
        self.norm = plain(layer.encoder_attn_layer_norm) if layer.normalize_before else None

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x (R,C) to what the attention adds to it."""
        return self.reader(x if self.norm is None else self.norm(x))

    def reorder(self, order: Tensor) -> None:
        self.reader.reorder(order)

    def states(self) -> list[tuple[nn.Module, object]]:
        """The memory of the source, with the attention, unless fairseq's incremental state has it."""
        return self.reader.states()


class FeedForwardStep:
    """The feed-forward part of a layer, and the recurrent units beside it."""

    def __init__(self, layer: FastWeightDecoderLayer, incremental_state: dict):
        kept = self.recurrence = layer.recurrence
        self.norm = plain(layer.final_layer_norm) if layer.normalize_before else None
        self.fc1, self.fc2 = plain(layer.fc1), plain(layer.fc2)
        units = None if kept is None else kept.part
        norm = layer.final_layer_norm if layer.normalize_before else None
        self.fused = FusedFeedForward(layer.fc2, norm, units) if FusedFeedForward.fits(layer.fc2, norm, units) else None
        own = type(layer.fc1) is nn.Linear and layer.activation_fn is RELU  # a result of its own, which may be changed
        self.activation = torch.relu_ if own else plain(layer.activation_fn)
        self.cell = None if kept is None else CellStepper(kept.part, taken(kept, incremental_state))

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x (R,C) to what the part adds to it."""
        if self.fused is not None and self.fused.takes(len(x)):
            return self.fused(x, None if self.cell is None else self.cell.start(x))
        y = self.fc2(self.activation(self.fc1(x if self.norm is None else self.norm(x))))
        return y if self.cell is None else y + self.cell(x)

    def reorder(self, order: Tensor) -> None:
        if self.cell is not None:
            self.cell.reorder(order)

    def states(self) -> list[tuple[nn.Module, object]]:
        """The state after the last token, with the part that it belongs to."""
        return [] if self.cell is None or self.cell.cell is None else [(self.recurrence, SruState(self.cell.cell.clone()))]
