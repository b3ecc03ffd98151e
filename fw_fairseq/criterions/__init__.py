"""The criterions that fairseq finds under --criterion."""

from .fast_weight_cross_entropy import FastWeightCrossEntropy, FastWeightLabelSmoothedCrossEntropy
from .retrieval_mse import RetrievalMse
from .t2r_distillation import T2rDistillation

__all__ = ["FastWeightCrossEntropy", "FastWeightLabelSmoothedCrossEntropy", "RetrievalMse", "T2rDistillation"]
