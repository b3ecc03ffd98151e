"""Token mixers: (T,B,C) and a state to (T,B,C) and the next state. One file each; see ``Mixer`` for the protocol."""

from .additive import Additive
from .base import Mixer
from .fast_weight import FastWeight
from .leap import Leap
from .sru import Sru
from .srupp import Srupp

MIXERS: dict[str, type[Mixer]] = {"fast_weight": FastWeight, "additive": Additive, "leap": Leap, "sru": Sru, "srupp": Srupp}

__all__ = ["MIXERS", "Additive", "FastWeight", "Leap", "Mixer", "Sru", "Srupp"]
