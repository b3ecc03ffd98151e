"""The cell of SRU in generation: one buffer (R,C), which every token changes in place in the compiled scan."""

from __future__ import annotations

import torch
from torch import Tensor

from ..mixers import Sru
from ..mixers.base import is_linear
from ..mixers.sru import SruState
from ..ops.native import integers, loop, takes


class Cell:
    """The cell of a layer for R rows."""

    def __init__(self, mixer: Sru, state: SruState | None, x: Tensor):
        self.mixer, self.cell = mixer, torch.zeros_like(x) if state is None else state.cell.clone()
        self.gate_weights, self.loop = [part.contiguous() for part in mixer.gate_weight], loop("sru", x.dtype)
        self.sizes = integers(1, *self.cell.shape, 1)

    @staticmethod
    def fits(mixer: Sru) -> bool:
        """Whether the compiled scan computes this mixer; it has no tanh."""
        return is_linear(mixer.in_proj) and not mixer.tanh and takes(mixer.gate_weight.detach())

    @staticmethod
    def takes(mixer: Sru, state: SruState | None, rows: int) -> bool:
        """Whether the buffer can hold the state."""
        return True

    def step(self, x: Tensor) -> Tensor:
        """Maps x (R,C) to y (R,C)."""
        x = x.contiguous()
        product, y = self.mixer.product(self.mixer.inner(x)), torch.empty_like(x)
        start = [part.data_ptr() for part in (product, x, *self.gate_weights)]
        self.loop(*start, None, None, self.cell.data_ptr(), y.data_ptr(), None, None, self.mixer.scale, self.sizes)
        return y

    def reorder(self, order: Tensor) -> None:
        """Gives row i the cell of row ``order[i]``."""
        self.cell = self.cell.index_select(0, order)
        self.sizes = integers(1, *self.cell.shape, 1)

    def state(self) -> SruState:
        """The state after the last token."""
        return SruState(self.cell.clone())
