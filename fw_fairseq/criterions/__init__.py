"""The criterions that fairseq finds under --criterion."""

from .fast_weight_cross_entropy import FastWeightCrossEntropy

__all__ = ["FastWeightCrossEntropy"]
