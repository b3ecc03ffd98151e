"""The models that fairseq finds under --arch."""

from .fast_weight_lm import FastWeightDecoder, FastWeightLanguageModel

__all__ = ["FastWeightDecoder", "FastWeightLanguageModel"]
