"""fairseq's layers with a mixer or linear attention in place of attention."""

from .decoder_layer import CarriedState, FastWeightDecoderLayer, MixerAttention
from .linear_attention import LinearAttention
from .translation_layers import LinearEncoderLayer, TranslationDecoderLayer

__all__ = [
    "CarriedState",
    "FastWeightDecoderLayer",
    "LinearAttention",
    "LinearEncoderLayer",
    "MixerAttention",
    "TranslationDecoderLayer",
]
