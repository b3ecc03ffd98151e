"""The cell of SRU in generation: one buffer (R,C), which every token changes in place in the compiled scan."""

from __future__ import annotations

import torch
from torch import Tensor

from ..mixers import Sru
from ..mixers.base import is_linear
from ..mixers.sru import SruState
from ..ops.native import integers, loop, takes
from .base import InPlaceStepper


class SruCell(InPlaceStepper):
    """The cell of a layer for R rows."""

    mixer: Sru

    @staticmethod
    def can_hold(mixer: Sru) -> bool:
        """Whether the compiled scan computes this mixer; it has no tanh."""
        return is_linear(mixer.in_proj) and not mixer.tanh and takes(mixer.gate_weight.detach())

    def start(self, state: SruState | None, x: Tensor) -> None:
        self.cell = torch.zeros_like(x) if state is None else state.cell.clone()
        self.gate_weights, self.loop = [part.contiguous() for part in self.mixer.gate_weight], loop("sru", x.dtype)
        self.sizes = integers(1, *self.cell.shape, 1)

    def step(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        product, y = self.mixer.product(self.mixer.inner(x)), torch.empty_like(x)
        start = [part.data_ptr() for part in (product, x, *self.gate_weights)]
        self.loop(*start, None, None, self.cell.data_ptr(), y.data_ptr(), None, None, self.mixer.scale, self.sizes)
        return y

    def reorder_buffers(self, order: Tensor) -> None:
        self.cell = self.cell.index_select(0, order)
        self.sizes = integers(1, *self.cell.shape, 1)

    def buffered_state(self) -> SruState:
        return SruState(self.cell.clone())
