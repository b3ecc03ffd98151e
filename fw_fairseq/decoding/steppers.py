"""One mixer that reads one token of each row at a time."""

from __future__ import annotations

from torch import Tensor

from ..mixers import FastWeight, Mixer
from ..ops import FastWeightState
from .memory import Memory, fits


class Stepper:
    """Calls the mixer, which returns a new state for each token."""

    def __init__(self, mixer: Mixer, state):
        self.mixer, self.state = mixer, state

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x (R,C) to y (R,C)."""
        y, self.state = self.mixer(x.unsqueeze(0), self.state, decoding=True)
        return y.squeeze(0)

    def reorder(self, order: Tensor) -> None:
        """Gives row i the state of row ``order[i]``."""
        if self.state is not None:
            self.state = self.state.index_select(order)


class FastWeightStepper(Stepper):
    """Keeps one memory and writes into it. A memory that is still a few factors stays with the mixer until it is a matrix."""

    def __init__(self, mixer: FastWeight, state: FastWeightState | None):
        super().__init__(mixer, state)
        self.memory: Memory | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.memory is None:
            if not Memory.takes(self.mixer, self._state, len(x)):
                return super().__call__(x)
            self.memory, self._state = Memory(self.mixer, self._state, len(x), x), None
        return self.memory.step(x)

    @property
    def state(self) -> FastWeightState | None:
        """The state after the last token."""
        return self._state if self.memory is None else self.memory.state()

    @state.setter
    def state(self, state: FastWeightState | None) -> None:
        self._state = state

    def reorder(self, order: Tensor) -> None:
        if self.memory is None:
            super().reorder(order)
        else:
            self.memory.reorder(order)


def make_stepper(mixer: Mixer, state) -> Stepper:
    """The stepper of a mixer that continues from this state; None stands for the first token."""
    return FastWeightStepper(mixer, state) if type(mixer) is FastWeight and fits(mixer) else Stepper(mixer, state)
