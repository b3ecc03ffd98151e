"""Token mixers: (T,B,C) and a state to (T,B,C) and the next state. One file each; see ``Mixer`` for the protocol."""

from .additive import Additive
from .base import Mixer
from .bounded import Abc, Gsa, Linformer
from .fast_weight import FastWeight
from .leap import Leap
from .local_attention import LocalAttention, TransformerXl
from .sru import Sru
from .srupp import Srupp
from .units import FwmLstm, Lstm

MIXERS: dict[str, type[Mixer]] = {
    "fast_weight": FastWeight,
    "additive": Additive,
    "leap": Leap,
    "sru": Sru,
    "lstm": Lstm,
    "fwm_lstm": FwmLstm,
    "srupp": Srupp,
    "local_attention": LocalAttention,
    "transformer_xl": TransformerXl,
    "linformer": Linformer,
    "abc": Abc,
    "gsa": Gsa,
}

__all__ = [
    "MIXERS",
    "Abc",
    "Additive",
    "FastWeight",
    "FwmLstm",
    "Gsa",
    "Leap",
    "Linformer",
    "LocalAttention",
    "Lstm",
    "Mixer",
    "Sru",
    "Srupp",
    "TransformerXl",
]
