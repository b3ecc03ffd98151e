"""The criterions that fairseq finds under --criterion."""

from .fast_weight_cross_entropy import FastWeightCrossEntropy
from .retrieval_mse import RetrievalMse

__all__ = ["FastWeightCrossEntropy", "RetrievalMse"]
