"""Recurrent networks whose tokens run one after the other, because their gates read the last output."""

from .fwm_lstm import FwmLstm
from .lstm import Lstm

__all__ = ["FwmLstm", "Lstm"]
