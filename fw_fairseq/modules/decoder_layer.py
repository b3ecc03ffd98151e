"""fairseq's decoder layer with a mixer in place of self-attention."""

from __future__ import annotations

import torch
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import Tensor, nn

from ..config import SOFTMAX
from ..mixers import MIXERS
from .mixer_attention import MixerAttention
from .streams import LayerStates, with_arguments


class NoFeedForward(nn.Module):
    """Adds nothing: --decoder-ffn-embed-dim 0."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class FastWeightDecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer. ``mixer`` names what takes the place of its self-attention; "softmax" leaves it there."""

    def __init__(self, cfg, config, mixer: str, layer: int, no_encoder_attn: bool = False):
        self._mixer = (config, mixer, layer)
        super().__init__(cfg, no_encoder_attn)
        if cfg.decoder.ffn_embed_dim == 0:
            self.fc1, self.fc2, self.final_layer_norm = nn.Identity(), NoFeedForward(), nn.Identity()

    def forward(self, x: Tensor, *args, states: LayerStates | None = None, reset_mask: Tensor | None = None, **kwargs):
        """Calls fairseq's forward. ``states`` and ``reset_mask`` reach the mixer: see ``MixerAttention`` and ``Streams``."""
        mixers = [self.self_attn] if isinstance(self.self_attn, MixerAttention) else []
        with with_arguments(mixers, states=states, reset_mask=reset_mask):
            return super().forward(x, *args, **kwargs)

    def build_fc1(self, input_dim, output_dim, *quantisation):
        return super().build_fc1(input_dim, output_dim, *quantisation) if output_dim else None

    def build_fc2(self, input_dim, output_dim, *quantisation):
        return super().build_fc2(input_dim, output_dim, *quantisation) if input_dim else None

    def build_self_attention(self, embed_dim, cfg, add_bias_kv=False, add_zero_attn=False):
        config, mixer, layer = self._mixer
        if mixer == SOFTMAX:
            return super().build_self_attention(embed_dim, cfg, add_bias_kv, add_zero_attn)
        mixer = MIXERS[mixer].of_layer(embed_dim, cfg.decoder.attention_heads, config, layer, cfg.decoder.layers)
        return MixerAttention(mixer, layer)
