"""fairseq's layers with a mixer in place of self-attention."""

from .decoder_layer import CarriedState, FastWeightDecoderLayer, MixerAttention

__all__ = ["CarriedState", "FastWeightDecoderLayer", "MixerAttention"]
