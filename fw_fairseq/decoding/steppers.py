"""One mixer that reads one token of each row at a time."""

from __future__ import annotations

from torch import Tensor

from ..mixers import FastWeight, Mixer
from ..ops import FastWeightState
from .memory import Memory, fits


class Stepper:
    """Calls the mixer, which returns a new state for each token."""

    def __init__(self, mixer: Mixer, state):
        self.mixer, self.last = mixer, state

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x (R,C) to y (R,C)."""
        y, self.last = self.mixer(x.unsqueeze(0), self.last, decoding=True)
        return y.squeeze(0)

    def reorder(self, order: Tensor) -> None:
        """Gives row i the state of row ``order[i]``."""
        if self.last is not None:
            self.last = self.last.index_select(order)

    def state(self):
        """The state after the last token."""
        return self.last


class FastWeightStepper(Stepper):
    """Keeps one memory and writes into it. A memory that is still a few factors stays with the mixer until it is a matrix."""

    def __init__(self, mixer: FastWeight, state: FastWeightState | None):
        super().__init__(mixer, state)
        self.memory: Memory | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.memory is None:
            if not Memory.takes(self.mixer, self.last, len(x)):
                return super().__call__(x)
            self.memory, self.last = Memory(self.mixer, self.last, x), None
        return self.memory.step(x)

    def reorder(self, order: Tensor) -> None:
        if self.memory is None:
            super().reorder(order)
        else:
            self.memory.reorder(order)

    def state(self) -> FastWeightState | None:
        return super().state() if self.memory is None else self.memory.state()


def make_stepper(mixer: Mixer, state) -> Stepper:
    """The stepper of a mixer that continues from this state; None stands for the first token."""
    return FastWeightStepper(mixer, state) if type(mixer) is FastWeight and fits(mixer) else Stepper(mixer, state)
