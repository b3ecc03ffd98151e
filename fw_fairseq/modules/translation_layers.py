"""fairseq's encoder and decoder layers of translation, with linear attention where --linear-attention names it."""

from __future__ import annotations

import torch
from fairseq.models.transformer.transformer_config import TransformerConfig
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from torch import Tensor, nn

from ..config import FastWeightTransformerConfig, linear_attentions
from .decoder_layer import FastWeightDecoderLayer
from .layer_parts import Call, LayerParts, Part, with_noise
from .linear_attention import LinearAttention

# fairseq 0.12.2 copies these weights of an encoder layer, for a fused kernel of torch's softmax attention
COPIES = [f"{part}_{kind}" for part in ("in_proj", "out_proj", "fc1", "fc2") for kind in ("weight", "bias")]


class Copied(nn.Module):
    """Stands for sparse parts while fairseq 0.12.2 builds its layer and looks for weights to copy."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = torch.empty(0, 0), torch.empty(0)

    @property
    def q_proj(self) -> Copied:
        return self

    out_proj = q_proj


class LinearEncoderLayer(LayerParts, TransformerEncoderLayerBase):
    """fairseq's encoder layer, with linear self-attention if --linear-attention names the encoder.

    Its feed-forward part may be sparse; then, and in reversible layers, it runs as a sum of updates.
    """

    def __init__(self, cfg: TransformerConfig, config: FastWeightTransformerConfig, return_fc: bool) -> None:
        self._config = config
        super().__init__(cfg, return_fc=return_fc)
        for name in COPIES:
            self._parameters.pop(name, None)
        if config.qkv_sparsity:
            self.self_attn = self.build_attention(cfg.encoder.embed_dim, cfg)
        self.sparse_feed_forward(config, cfg, cfg.encoder, "encoder")

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        """Loads as a plain module does, without the copies."""
        nn.Module._load_from_state_dict(self, *args, **kwargs)

    def forward(self, x: Tensor, encoder_padding_mask: Tensor | None, attn_mask: Tensor | None = None) -> Tensor:
        """Calls fairseq's forward, or runs the updates where the layer has recurrent units."""
        if self.recurrence is None:
            return super().forward(x, encoder_padding_mask, attn_mask)
        call = self.call_of(encoder_padding_mask, attn_mask)
        return self.returned(self.run_in_order(x, call, self.parts(call)), call)

    def call_of(self, encoder_padding_mask: Tensor | None = None, attn_mask: Tensor | None = None) -> Call:
        """Returns fairseq's arguments as a ``Call``."""
        return Call(padding=encoder_padding_mask, mask=attn_mask)

    def returned(self, x: Tensor, call: Call) -> Tensor:
        """Returns x as fairseq's layer does."""
        return x

    def parts(self, call: Call) -> list[Part]:
        """What the parts add to the residual stream, in their order, and their norms."""
        attend = self.attend(self.self_attn, self.self_attn_layer_norm, call)
        return [(attend, self.self_attn_layer_norm), (self.feed(call), self.final_layer_norm)]

    def build_fc1(self, input_dim: int, output_dim: int, *quantisation) -> nn.Module:
        """Returns the first dense layer, or what stands for it until a sparse layer replaces it."""
        return Copied() if self._config.ffn_sparsity else super().build_fc1(input_dim, output_dim, *quantisation)

    def build_fc2(self, input_dim: int, output_dim: int, *quantisation) -> nn.Module:
        """Returns the second dense layer, or what stands for it until a sparse layer replaces it."""
        return Copied() if self._config.ffn_sparsity else super().build_fc2(input_dim, output_dim, *quantisation)

    def build_self_attention(self, embed_dim: int, cfg: TransformerConfig) -> nn.Module:
        """Returns self-attention, or what stands for it until the one with sparse projections replaces it."""
        return Copied() if self._config.qkv_sparsity else self.build_attention(embed_dim, cfg)

    def build_attention(self, embed_dim: int, cfg: TransformerConfig) -> nn.Module:
        """Returns linear or softmax self-attention."""
        if "encoder" in linear_attentions(self._config):
            return self.finished(LinearAttention(embed_dim, cfg.encoder.attention_heads, self._config), self._config, cfg)
        if self._config.qkv_sparsity:
            return self.sparse_softmax(self._config, cfg, cfg.encoder, "encoder", "encoder")
        return super().build_self_attention(embed_dim, cfg)


class TranslationDecoderLayer(FastWeightDecoderLayer):
    """The decoder layer of this project, with linear cross attention if --linear-attention names it."""

    def build_encoder_attention(self, embed_dim: int, cfg: TransformerConfig) -> nn.Module:
        """Returns linear or softmax cross attention."""
        config, _, _ = self._mixer
        if "cross" not in linear_attentions(config):
            return super().build_encoder_attention(embed_dim, cfg)
        linear = LinearAttention(embed_dim, cfg.decoder.attention_heads, config, cfg.encoder.embed_dim, "decoder")
        return with_noise(linear, cfg)
