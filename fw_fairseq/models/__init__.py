"""The models that fairseq finds under --arch."""

from .. import registration  # noqa: F401  where a script imports a model first, before fairseq
from . import mixer_lm  # noqa: F401
from .fast_weight_lm import FastWeightDecoder, FastWeightLanguageModel
from .fast_weight_transformer import FastWeightTransformer
from .retrieval import RetrievalModel

__all__ = ["FastWeightDecoder", "FastWeightLanguageModel", "FastWeightTransformer", "RetrievalModel"]
