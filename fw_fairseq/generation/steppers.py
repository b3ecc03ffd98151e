"""One mixer that reads one token of each row at a time."""

from __future__ import annotations

from torch import Tensor

from ..errors import Mistake
from ..mixers import Additive, FastWeight, Leap, Mixer, Sru
from .cell import Cell
from .compiled_memory import CompiledMemory
from .kernel_memory import KernelMemory
from .memory import Memory
from .operand_memory import OperandMemory
from .pools import Pools


def share(steppers: list[Stepper]) -> None:
    """Gives the steppers of a pass the one dictionary in which their layers share."""
    shared: dict = {}
    for stepper in steppers:
        stepper.shared = shared


def check_rows(rows: int, held: int) -> None:
    """Refuses tokens of other rows than the states have: loops trust in their number."""
    if rows != held:
        raise Mistake(f"tokens have {rows} rows and the states of this generation {held}; give as many or reorder the states")


class Stepper:
    """Calls the mixer, which returns a new state for each token.

    ``takes_projected``: whether ``of_projected`` may get what the input projection makes of a token. ``shared``: what the layers of
    a pass share, the same dictionary for all of them; each token replaces what the one before it left there.
    """

    takes_projected = False
    shared: dict | None = None

    def __init__(self, mixer: Mixer, state):
        self.mixer, self.last = mixer, state

    def __call__(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        """Maps x (R,C) to y (R,C). ``source``: what the input projection reads in place of x."""
        given = {} if source is None else {"source": source.unsqueeze(0)}
        given |= {"shared": self.shared} if self.mixer.takes_shared else {}
        y, self.last = self.mixer(x.unsqueeze(0), self.last, decoding=True, **given)
        return y.squeeze(0)

    def reorder(self, order: Tensor) -> None:
        """Gives row i the state of row ``order[i]``."""
        if self.last is not None:
            self.last = self.last.index_select(order)

    def state(self):
        """The state after the last token."""
        return self.last


class InPlaceStepper(Stepper):
    """Keeps the state in buffers and changes them there.

    kind: the class of the buffers, ``kind(mixer, state, x)``, with ``step``, ``reorder`` and ``state`` as this class has them.
        ``kind.takes(mixer, state, rows)`` says whether they can hold the state yet: until then the mixer is called.
    """

    def __init__(self, mixer: Mixer, state, kind: type):
        super().__init__(mixer, state)
        self.kind, self.buffers = kind, None
        self.rows: int | None = None if state is None else state[0].shape[0]  # that the states have
        self.takes_projected = kind in (CompiledMemory, Memory)

    def ready(self, rows: int) -> bool:
        """Whether the buffers hold the state, or can hold it from now on."""
        self.check(rows)
        return self.buffers is not None or self.kind.takes(self.mixer, self.last, rows)

    def check(self, rows: int) -> None:
        """Refuses tokens of other rows than the states have."""
        check_rows(rows, rows if self.rows is None else self.rows)
        self.rows = rows

    def of_projected(self, parts: Tensor) -> Tensor:
        """Maps what the input projection makes of a token, (R,P), to y (R,C). ``ready`` has been asked for its rows."""
        if self.buffers is None:
            self.buffers, self.last = self.kind(self.mixer, self.last, parts), None
        return self.buffers.of_projected(parts)

    def __call__(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        self.check(len(x))
        if self.buffers is None:
            if not self.kind.takes(self.mixer, self.last, len(x)):
                return super().__call__(x, source)
            self.buffers, self.last = self.kind(self.mixer, self.last, x), None
        given = {"shared": self.shared} if self.mixer.takes_shared else {}
        return self.buffers.step(x if source is None else source, **given)

    def reorder(self, order: Tensor) -> None:
        self.rows = None if self.rows is None else len(order)
        super().reorder(order) if self.buffers is None else self.buffers.reorder(order)

    def state(self):
        return super().state() if self.buffers is None else self.buffers.state()


BUFFERS = {
    FastWeight: (KernelMemory, CompiledMemory, Memory, OperandMemory),
    Additive: (Pools,),
    Leap: (Pools,),
    Sru: (Cell,),
}  # the best of each mixer first


def step_mixer(mixer: Mixer, state) -> Stepper:
    """Returns the stepper of a mixer that continues from this state; None: from the first token."""
    for kind in BUFFERS.get(type(mixer), ()):
        if kind.fits(mixer):
            return InPlaceStepper(mixer, state, kind)
    return Stepper(mixer, state)
