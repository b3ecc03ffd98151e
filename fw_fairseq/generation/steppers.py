"""Which stepper reads the tokens of a mixer."""

from __future__ import annotations

from typing import Any

from ..mixers import Additive, FastWeight, Leap, Mixer, Sru
from .base import InPlaceStepper, Stepper
from .kernel_memory import KernelMemory
from .memory import Memory
from .pools import Pools
from .sru_cell import SruCell

KINDS: dict[type, tuple[type[InPlaceStepper], ...]] = {
    FastWeight: (KernelMemory, Memory),
    Additive: (Pools,),
    Leap: (Pools,),
    Sru: (SruCell,),
}  # the best of each mixer first


def step_mixer(mixer: Mixer, state: Any) -> Stepper:
    """Returns the stepper of a mixer that continues from this state; None: from the first token."""
    for kind in KINDS.get(type(mixer), ()):
        if kind.can_hold(mixer):
            return kind(mixer, state)
    return Stepper(mixer, state)


def share(steppers: list[Stepper]) -> None:
    """Gives the steppers of a pass the one dictionary in which their layers share."""
    shared: dict = {}
    for stepper in steppers:
        stepper.shared = shared
