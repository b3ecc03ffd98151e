"""fairseq's layers with a mixer or linear attention in place of attention."""

from .decoder_layer import FastWeightDecoderLayer
from .linear_attention import LinearAttention
from .stateful import MixerAttention, Stateful
from .streams import LayerStates, Streams, of_this_thread, with_arguments
from .translation_layers import LinearEncoderLayer, TranslationDecoderLayer

__all__ = [
    "FastWeightDecoderLayer",
    "LayerStates",
    "LinearAttention",
    "LinearEncoderLayer",
    "MixerAttention",
    "Stateful",
    "Streams",
    "TranslationDecoderLayer",
    "of_this_thread",
    "with_arguments",
]
