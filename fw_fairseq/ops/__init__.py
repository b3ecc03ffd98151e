"""Fast-weight layers as one differentiable operation. Imports torch and nothing of fairseq."""

from ..feature_maps import RowMap
from .operation import fast_weight
from .state import FastWeightState

__all__ = ["FastWeightState", "RowMap", "fast_weight"]
