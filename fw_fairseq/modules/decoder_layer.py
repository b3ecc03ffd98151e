"""fairseq's decoder layer with a mixer in place of self-attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fairseq.models.transformer.transformer_config import TransformerConfig
from fairseq.modules import MultiheadAttention
from fairseq.modules.quant_noise import quant_noise
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import Tensor, nn

from ..config import SOFTMAX, FastWeightConfig
from ..errors import Mistake
from ..generation.layer import swiglu
from ..mixers import MIXERS
from ..mixers.parts.channel_mixing import ChannelMixing, LastToken
from .layer_parts import Call, LayerParts, Part, Update, with_noise
from .stateful import MixerAttention, StatefulModule
from .streams import LayerStates

FOR_MIXERS = ("states", "reset_mask", "shared")


class NoFeedForward(nn.Module):
    """Adds nothing: --decoder-ffn-embed-dim 0."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class FastWeightDecoderLayer(LayerParts, TransformerDecoderLayerBase):
    """fairseq's decoder layer. ``mixer`` names what takes the place of its self-attention; "softmax" leaves it there.

    ``layer``: its number, the name of its states. The forward is not fairseq's, which could not hand states on to a mixer.
    """

    self_attn_layer_norm: Any

    def __init__(
        self, cfg: TransformerConfig, config: FastWeightConfig, mixer: str, layer: int, no_encoder_attn: bool = False
    ) -> None:
        self._mixer = (config, mixer, layer)
        super().__init__(cfg, no_encoder_attn)
        if cfg.decoder.ffn_embed_dim == 0:
            self.fc1, self.fc2, self.final_layer_norm = nn.Identity(), NoFeedForward(), nn.Identity()
        self.sparse_feed_forward(config, cfg, cfg.decoder, layer)
        if self.ffn_form == "swiglu":
            self.activation_fn = swiglu
        elif self.ffn_form != "plain":
            self.mix_channels(cfg, layer)
        if self.alone:
            self.self_attn_layer_norm = None
        more = range(1, getattr(config, "decoder_attentions", 1))
        self.more_attention = nn.ModuleList(self.build_mixer(self.embed_dim, cfg, layer + i * cfg.decoder.layers) for i in more)
        self.more_norms = nn.ModuleList(nn.Identity() if self.alone else nn.LayerNorm(self.embed_dim) for _ in more)

    def forward(self, x: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor | None, None]:
        """Maps x (T,B,C) to (T,B,C). The other arguments are those of ``call_of``."""
        if self.cross_self_attention:  # of softmax layers alone
            return super().forward(x, *args, **{name: value for name, value in kwargs.items() if name not in FOR_MIXERS})
        call = self.call_of(*args, **kwargs)
        if self.norms_residual:
            x = self.self_attn_layer_norm(x)
        return self.returned(self.run_in_order(x, call, self.parts(call)), call)

    def call_of(
        self,
        encoder_out: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        prev_self_attn_state: None = None,
        prev_attn_state: None = None,
        self_attn_mask: Tensor | None = None,
        self_attn_padding_mask: Tensor | None = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
        states: LayerStates | None = None,
        reset_mask: Tensor | None = None,
        shared: dict[str, Tensor] | None = None,
    ) -> Call:
        """The arguments of fairseq's layer, and three for the mixer: see ``MixerAttention``."""
        masks = self_attn_mask, self_attn_padding_mask
        wanted = need_attn or need_head_weights or (not self.training and self.need_attn)
        if self._mixer[0].reversible or self.recurrence is not None or len(self.more_attention):
            wanted = wanted and not (self.training or torch.is_grad_enabled())  # kept weights would keep activations
        weights = [need_head_weights] if wanted else None
        return Call(encoder_out, encoder_padding_mask, incremental_state, *masks, states, reset_mask, shared, weights)

    def returned(self, x: Tensor, call: Call) -> tuple[Tensor, Tensor | None, None]:
        """x as fairseq's layer returns it, with the weights of cross attention where they are wanted."""
        return x, call.weights[-1] if call.weights and len(call.weights) > 1 else None, None

    @property
    def norms_residual(self) -> bool:
        """Whether the residual connection around the mixer takes its normed input."""
        return self.normalize_before and isinstance(self.self_attn, MixerAttention) and self.self_attn.mixer.norms_residual

    @property
    def alone(self) -> bool:
        """Whether nothing is around the mixer."""
        return isinstance(self.self_attn, MixerAttention) and self.self_attn.mixer.alone

    def parts(self, call: Call) -> list[Part]:
        """What the parts add to the residual stream, in their order, and their norms."""
        norm = self.self_attn_layer_norm
        found: list[Part] = [(self.attend(self.self_attn, None if self.norms_residual else norm, call), norm)]
        for attention, norm in zip(self.more_attention, self.more_norms):
            norm = None if self.alone else norm
            found.append((self.attend(attention, norm, call), norm))
        if self.encoder_attn is not None and call.source is not None:
            found.append((self.look_at_source(call), self.encoder_attn_layer_norm))
        found.append((self.feed(call), self.final_layer_norm))
        return found

    def look_at_source(self, call: Call) -> Update:
        """The update of cross attention."""

        def update(x: Tensor, source: Tensor | None) -> Tensor:
            x = self.encoder_attn_layer_norm(x) if self.normalize_before else x
            y, weights = self.encoder_attn(
                query=x, key=source, value=source, key_padding_mask=call.source_padding, incremental_state=call.incremental_state,
                static_kv=True, need_weights=call.weights is not None, need_head_weights=bool(call.weights and call.weights[0]),
            )  # fmt: skip
            if call.weights is not None:
                call.weights.append(weights)
            return self.dropout_module(y)

        return update

    @property
    def ffn_form(self) -> str:
        """That of --ffn-form."""
        return str(getattr(self._mixer[0], "ffn_form", "plain"))

    def mix_channels(self, cfg: TransformerConfig, layer: int) -> None:
        """Puts RWKV's channel mixing in place of both maps of the feed-forward layer."""
        if self.ffn_layernorm is not None:
            raise Mistake(f"--scale-fc is for feed-forward layers without channel mixing, and --ffn-form is {self.ffn_form}")
        sizes = self.embed_dim, cfg.decoder.ffn_embed_dim
        depth = 1 - layer / cfg.decoder.layers
        part = ChannelMixing(*sizes, self.ffn_form == "rwkv6", depth, self.activation_dropout_module)
        self.fc1, self.fc2 = nn.Identity(), NoFeedForward()
        self.channel_mixing = StatefulModule(with_noise(part, cfg), LastToken, f"{layer}.channel_mixing")

    def build_fc1(self, input_dim: int, output_dim: int, *quantisation) -> nn.Module | None:
        return self.build_map(super().build_fc1, 2, input_dim, output_dim, *quantisation)

    def build_fc2(self, input_dim: int, output_dim: int, *quantisation) -> nn.Module | None:
        return self.build_map(super().build_fc2, 1, input_dim, output_dim, *quantisation)

    def build_map(self, plain: Callable, halves: int, input_dim: int, output_dim: int, *quantisation) -> nn.Module | None:
        """One of the two maps of the feed-forward layer, by ``plain`` where it is fairseq's. ``halves``: how many outputs of this
        width SwiGLU has side by side."""
        if not (input_dim and output_dim) or self._mixer[0].ffn_sparsity or self.ffn_form.startswith("rwkv"):
            return None
        if self.ffn_form == "swiglu":
            return quant_noise(nn.Linear(input_dim, halves * output_dim, bias=False), *quantisation)
        return plain(input_dim, output_dim, *quantisation)

    def build_self_attention(self, embed_dim: int, cfg: TransformerConfig, **unused) -> nn.Module:
        return self.build_mixer(embed_dim, cfg, self._mixer[2])

    def build_mixer(self, embed_dim: int, cfg: TransformerConfig, name: int) -> nn.Module:
        """A mixer of the layer, or softmax attention. ``name``: that of its states."""
        config, mixer, layer = self._mixer
        if mixer != SOFTMAX:
            made = MIXERS[mixer].of_layer(embed_dim, cfg.decoder.attention_heads, config, layer, cfg.decoder.layers)
            return self.finished(MixerAttention(made, name), config, cfg)
        if config.qkv_sparsity:
            return self.sparse_softmax(config, cfg, cfg.decoder, name, "decoder")
        attention = super().build_self_attention(embed_dim, cfg)
        return without_biases(attention) if config.bias_free else attention


def without_biases(attention: MultiheadAttention) -> nn.Module:
    """fairseq's attention joins its biases and fails where there are none; here they are zeros, and no parameters."""
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj):
        zeros = torch.zeros_like(linear.bias.detach())
        del linear.bias
        linear.register_buffer("bias", zeros)
    return attention
