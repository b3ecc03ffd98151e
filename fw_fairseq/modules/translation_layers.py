"""fairseq's encoder and decoder layers of translation, with linear attention where --linear-attention names it."""

from __future__ import annotations

from fairseq.modules.transformer_layer import TransformerEncoderLayerBase

from ..config import linear_attentions
from .decoder_layer import FastWeightDecoderLayer
from .linear_attention import LinearAttention


class LinearEncoderLayer(TransformerEncoderLayerBase):
    """fairseq's encoder layer, with linear self-attention if --linear-attention names the encoder."""

    def __init__(self, cfg, config, return_fc: bool = False):
        self._config = config
        super().__init__(cfg, return_fc=return_fc)

    def build_self_attention(self, embed_dim, cfg):
        """Returns linear or softmax self-attention."""
        if "encoder" not in linear_attentions(self._config):
            return super().build_self_attention(embed_dim, cfg)
        return LinearAttention(embed_dim, cfg.encoder.attention_heads, self._config)


class TranslationDecoderLayer(FastWeightDecoderLayer):
    """The decoder layer of this project, with linear cross attention if --linear-attention names it."""

    def build_encoder_attention(self, embed_dim, cfg):
        """Returns linear or softmax cross attention."""
        config, _, _ = self._mixer
        if "cross" not in linear_attentions(config):
            return super().build_encoder_attention(embed_dim, cfg)
        return LinearAttention(embed_dim, cfg.decoder.attention_heads, config, cfg.encoder.embed_dim, "decoder")
