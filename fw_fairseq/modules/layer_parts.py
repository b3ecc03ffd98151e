"""What the layers of encoder and decoder have in common: each of their parts adds an update to the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fairseq.models.transformer.transformer_config import EncDecBaseConfig, TransformerConfig
from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor, nn

from ..config import FastWeightConfig
from ..mixers.sru import SruState
from .linear_attention import LinearAttention
from .sparse import RecurrentUnits, SparseAttention, SparseFeedForward, make_sparse
from .stateful import MixerAttention, Stateful, StatefulModule
from .streams import LayerStates

Update = Callable[[Tensor, "Tensor | None"], Tensor]  # of the residual stream and the encoder's output
Part = tuple[Update, "nn.Module | None"]  # an update, and the norm before or after it; None: what is x next, in place of an update


class Call(NamedTuple):
    """A layer is called with these, beside x."""

    source: Tensor | None = None  # the encoder's output
    source_padding: Tensor | None = None
    incremental_state: dict | None = None
    mask: Tensor | None = None
    padding: Tensor | None = None
    states: LayerStates | None = None
    reset_mask: Tensor | None = None
    shared: dict[str, Tensor] | None = None
    weights: list[Any] | None = None  # gets the weights of cross attention; its first entry says whether they are by head


class LayerParts:
    """A mixin for fairseq's layers, which have these parts."""

    normalize_before: bool
    final_layer_norm: nn.Module
    fc1: Any
    fc2: Any
    activation_fn: Any
    dropout_module: Any
    activation_dropout_module: Any
    nh: int  # this and the next four: in a decoder, with fairseq's options for them
    c_attn: Any
    attn_ln: Any
    ffn_layernorm: Any
    w_resid: Any

    def sparse_feed_forward(
        self, config: FastWeightConfig, cfg: TransformerConfig, sizes: EncDecBaseConfig, layer: int | str
    ) -> None:
        """Adds the sparse and recurrent parts that the options ask for. ``sizes``: the options of the encoder or the decoder."""
        width, units = sizes.embed_dim, sizes.ffn_embed_dim
        if config.ffn_sparsity:
            dropout = FairseqDropout(self.activation_dropout_module.p, module_name=type(self).__name__)
            settings = (config.ffn_sparsity, config.ffn_controller_dim, self.activation_fn, dropout)
            self.fc1, self.fc2 = nn.Identity(), SparseFeedForward(width, units, *settings)
            self.activation_fn, self.activation_dropout_module = nn.Identity(), FairseqDropout(0.0)
        recurrent = RecurrentUnits(width, config.ffn_sru) if config.ffn_sru else None
        self.recurrence = None if recurrent is None else StatefulModule(recurrent, SruState, f"{layer}.recurrence")
        self.channel_mixing: StatefulModule | None = None

    def finished(self, attention: MixerAttention | LinearAttention, config: FastWeightConfig, cfg: TransformerConfig) -> nn.Module:
        """Returns the attention with the sparse projections, or the noise on its weights, that the options ask for."""
        if config.qkv_sparsity:
            make_sparse(attention, config.qkv_sparsity)
        return with_noise(attention, cfg)

    def sparse_softmax(
        self, config: FastWeightConfig, cfg: TransformerConfig, sizes: EncDecBaseConfig, layer: int | str, part: str
    ) -> SparseAttention:
        """Returns softmax attention with sparse projections."""
        return SparseAttention(sizes.embed_dim, sizes.attention_heads, config.qkv_sparsity, cfg.attention_dropout, layer, part)

    def attend(self, attention: nn.Module, norm: nn.Module | None, call: Call) -> Update:
        """The update of self-attention. ``norm``: the one before it, if it is not the residual stream's."""

        def update(x: Tensor, source: Tensor | None) -> Tensor:
            x = norm(x) if self.normalize_before and norm is not None else x
            given: dict[str, Any] = (
                {"states": call.states, "reset_mask": call.reset_mask} if isinstance(attention, Stateful) else {}
            )
            if isinstance(attention, MixerAttention):
                given["shared"] = call.shared
            y, _ = attention(
                query=x, key=x, value=x, key_padding_mask=call.padding, incremental_state=call.incremental_state,
                need_weights=False, attn_mask=call.mask, **given,
            )  # fmt: skip
            return y if isinstance(attention, MixerAttention) and attention.mixer.alone else self.dropout_module(self.scaled(y))

        return update

    def scaled(self, y: Tensor) -> Tensor:
        """What attention gives, with --scale-heads and --scale-attn."""
        if getattr(self, "c_attn", None) is not None:
            y = (y.unflatten(-1, (self.nh, -1)) * self.c_attn[:, None]).flatten(-2)
        return y if getattr(self, "attn_ln", None) is None else self.attn_ln(y)

    def feed(self, call: Call) -> Update:
        """The update of the feed-forward part and of the recurrent units beside it."""

        def update(x: Tensor, source: Tensor | None) -> Tensor:
            y = self.final_layer_norm(x) if self.normalize_before else x
            if self.channel_mixing is not None:
                y = self.channel_mixing(y, call.padding, call.incremental_state, call.states, call.reset_mask)
            else:
                y = self.activation_dropout_module(self.activation_fn(self.fc1(y)))
                y = self.fc2(y if getattr(self, "ffn_layernorm", None) is None else self.ffn_layernorm(y))
            y = self.dropout_module(y)
            if self.recurrence is None:
                return y
            return y + self.dropout_module(self.recurrence(x, call.padding, call.incremental_state, call.states, call.reset_mask))

        return update

    def run_in_order(self, x: Tensor, call: Call, parts: list[Part]) -> Tensor:
        """Runs all updates on one stream, with norms before or after them."""
        for update, norm in parts:
            if norm is None:
                x = update(x, call.source)
                continue
            scaled = getattr(self, "w_resid", None) is not None and norm is self.final_layer_norm
            x = (x * self.w_resid if scaled else x) + update(x, call.source)
            x = x if self.normalize_before else norm(x)
        return x


def with_noise(attention: nn.Module, cfg: TransformerConfig) -> nn.Module:
    """Returns the attention with the noise of --quant-noise-pq on its dense layers, as fairseq's attention has it. ``cfg``: options
    of a Transformer."""
    share, block = cfg.quant_noise.pq, cfg.quant_noise.pq_block_size
    for layer in attention.modules():
        if share > 0 and isinstance(layer, nn.Linear):
            quant_noise(layer, share, block)
    return attention
