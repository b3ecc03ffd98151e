"""fairseq's decoder layer with a mixer in place of self-attention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import Tensor, nn

from ..config import SOFTMAX
from ..mixers import MIXERS
from .mixer_attention import MixerAttention
from .sparse.softmax import SparseAttention
from .stateful import Stateful
from .streams import LayerStates, with_arguments
from .updates import Call, Updates, with_noise


class NoFeedForward(nn.Module):
    """Adds nothing: --decoder-ffn-embed-dim 0."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class NormOfResidual(nn.LayerNorm):
    """The norm before a mixer whose residual connection takes the normed input. The layer calls ``norm`` before fairseq's forward,
    which then finds nothing left to do."""

    def norm(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def forward(self, x: Tensor) -> Tensor:
        return x


class FastWeightDecoderLayer(Updates, TransformerDecoderLayerBase):
    """fairseq's decoder layer. ``mixer`` names what takes the place of its self-attention; "softmax" leaves it there.

    Its feed-forward part may be sparse; then, and in reversible layers, it runs as a sum of updates.
    """

    def __init__(self, cfg, config, mixer: str, layer: int, no_encoder_attn: bool = False):
        self._mixer = (config, mixer, layer)
        super().__init__(cfg, no_encoder_attn)
        if cfg.decoder.ffn_embed_dim == 0:
            self.fc1, self.fc2, self.final_layer_norm = nn.Identity(), NoFeedForward(), nn.Identity()
        self.sparse_feed_forward(config, cfg, cfg.decoder, layer)
        if self.normalize_before and isinstance(self.self_attn, MixerAttention) and self.self_attn.mixer.norms_residual:
            self.self_attn_layer_norm = NormOfResidual(self.embed_dim)
        more = range(1, getattr(config, "decoder_attentions", 1))
        self.more_attention = nn.ModuleList(self.build_mixer(self.embed_dim, cfg, layer + i * cfg.decoder.layers) for i in more)
        self.more_norms = nn.ModuleList(nn.LayerNorm(self.embed_dim) for _ in more)

    def forward(
        self,
        x: Tensor,
        *args,
        states: LayerStates | None = None,
        reset_mask: Tensor | None = None,
        shared: dict | None = None,
        **kwargs,
    ):
        """Calls fairseq's forward. The other three reach the mixer: see ``MixerAttention`` and ``Streams``."""
        given = {"states": states, "reset_mask": reset_mask, "shared": shared}
        if isinstance(self.self_attn_layer_norm, NormOfResidual):
            x = self.self_attn_layer_norm.norm(x)
        if self.recurrence is not None or len(self.more_attention):
            call = self.call_of(*args, **given, **kwargs)
            return self.returned(self.run_in_order(x, call), call)
        mixers = [self.self_attn] if isinstance(self.self_attn, Stateful) else []
        with with_arguments(mixers, **given):
            return super().forward(x, *args, **kwargs)

    def call_of(
        self,
        encoder_out: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        prev_self_attn_state=None,
        prev_attn_state=None,
        self_attn_mask: Tensor | None = None,
        self_attn_padding_mask: Tensor | None = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
        states: LayerStates | None = None,
        reset_mask: Tensor | None = None,
        shared: dict | None = None,
    ) -> Call:
        """Returns fairseq's arguments as a ``Call``."""
        masks = self_attn_mask, self_attn_padding_mask
        weights = None if self.training or torch.is_grad_enabled() else [need_head_weights]
        return Call(encoder_out, encoder_padding_mask, incremental_state, *masks, states, reset_mask, weights, shared)

    def returned(self, x: Tensor, call: Call) -> tuple:
        """Returns x as fairseq's layer does, with the weights of cross attention outside of training."""
        weights = call.weights[-1] if call.weights and len(call.weights) > 1 else None
        return x, weights, None

    def updates(self, call: Call) -> list[Callable[[Tensor, Tensor | None], Tensor]]:
        """Returns what the parts add to the residual stream, in their order."""
        found = [self.attend(self.self_attn, self.self_attn_layer_norm, call)]
        found += [self.attend(*pair, call) for pair in zip(self.more_attention, self.more_norms)]
        if self.encoder_attn is not None and call.source is not None:
            found.append(self.look_at_source(call))
        return [*found, self.feed(call)]

    def norms(self) -> list[nn.Module]:
        """Returns the norms of these parts."""
        cross = [] if self.encoder_attn is None else [self.encoder_attn_layer_norm]
        return [self.self_attn_layer_norm, *self.more_norms, *cross, self.final_layer_norm]

    def look_at_source(self, call: Call) -> Callable[[Tensor, Tensor | None], Tensor]:
        """The update of cross attention."""

        def run(x: Tensor, source: Tensor | None) -> Tensor:
            x = self.encoder_attn_layer_norm(x) if self.normalize_before else x
            wanted = call.weights is not None
            y, weights = self.encoder_attn(
                query=x, key=source, value=source, key_padding_mask=call.source_padding, incremental_state=call.incremental_state,
                static_kv=True, need_weights=wanted, need_head_weights=wanted and call.weights[0],
            )  # fmt: skip
            if wanted:
                call.weights.append(weights)
            return self.dropout_module(y)

        return run

    def build_fc1(self, input_dim, output_dim, *quantisation):
        sparse = self._mixer[0].ffn_sparsity
        return super().build_fc1(input_dim, output_dim, *quantisation) if output_dim and not sparse else None

    def build_fc2(self, input_dim, output_dim, *quantisation):
        sparse = self._mixer[0].ffn_sparsity
        return super().build_fc2(input_dim, output_dim, *quantisation) if input_dim and not sparse else None

    def build_self_attention(self, embed_dim, cfg, **unused):
        return self.build_mixer(embed_dim, cfg, self._mixer[2])

    def build_mixer(self, embed_dim: int, cfg, name: int) -> nn.Module:
        """Returns a mixer of the layer, or softmax attention. ``name``: that of its states."""
        config, mixer, layer = self._mixer
        heads = cfg.decoder.attention_heads
        if mixer == SOFTMAX and not config.qkv_sparsity:
            attention = super().build_self_attention(embed_dim, cfg)
            return without_biases(attention) if config.bias_free else attention
        if mixer == SOFTMAX:
            return SparseAttention(embed_dim, heads, config.qkv_sparsity, cfg.attention_dropout, name)
        made = MIXERS[mixer].of_layer(embed_dim, heads, config, layer, cfg.decoder.layers)
        return with_noise(MixerAttention(made, name, config.qkv_sparsity), cfg)


def without_biases(attention: nn.Module) -> nn.Module:
    """fairseq's attention joins its biases and fails where there are none; here they are zeros, and no parameters."""
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj):
        zeros = torch.zeros_like(linear.bias.detach())
        del linear.bias
        linear.register_buffer("bias", zeros)
    return attention
