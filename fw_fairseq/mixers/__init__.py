"""Token mixers: (T,B,C) and a state to (T,B,C) and the next state. One file each; see ``Mixer`` for the protocol."""

from .base import Mixer
from .fast_weight import FastWeight

MIXERS: dict[str, type[Mixer]] = {"fast_weight": FastWeight}

__all__ = ["MIXERS", "FastWeight", "Mixer"]
