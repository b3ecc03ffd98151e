"""Layers as sums of updates: what each of their parts adds to the residual stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fairseq.modules.fairseq_dropout import FairseqDropout
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor, nn

from ..config import option_name
from ..errors import Mistake
from ..mixers.sru import SruState
from .sparse import RecurrentUnits, SparseFeedForward
from .stateful import Kept

# fairseq's options that add a part to a layer, and the name of the part there
EXTRAS = {"scale_fc": "ffn_layernorm", "scale_attn": "attn_ln", "scale_heads": "c_attn", "scale_resids": "w_resid"}


class Call(NamedTuple):
    """A layer is called with these, beside x."""

    source: Tensor | None = None  # the encoder's output
    source_padding: Tensor | None = None
    incremental_state: dict | None = None
    mask: Tensor | None = None
    padding: Tensor | None = None
    states: object = None
    reset_mask: Tensor | None = None
    weights: list | None = None  # gets the weights of cross attention
    shared: dict | None = None


class Updates:
    """A mixin for fairseq's layers: their feed-forward part may be sparse and may have recurrent units beside it."""

    def sparse_feed_forward(self, config, cfg, sizes, layer: int | str) -> None:
        """Adds what the options ask for. ``sizes``: the group of options of the encoder or the decoder."""
        width, units = sizes.embed_dim, sizes.ffn_embed_dim
        if config.ffn_sparsity:
            dropout = FairseqDropout(self.activation_dropout_module.p, module_name=type(self).__name__)
            settings = (config.ffn_sparsity, config.ffn_controller_dim, self.activation_fn, dropout)
            self.fc1, self.fc2 = nn.Identity(), SparseFeedForward(width, units, *settings)
            self.activation_fn, self.activation_dropout_module = nn.Identity(), FairseqDropout(0.0)
        self.recurrence = Kept(RecurrentUnits(width, config.ffn_sru), SruState, f"{layer}.recurrence") if config.ffn_sru else None

    def attend(self, attention: nn.Module, norm: nn.Module, call: Call) -> Callable[[Tensor, Tensor | None], Tensor]:
        """The update of self-attention."""

        def run(x: Tensor, source: Tensor | None) -> Tensor:
            x = norm(x) if self.normalize_before else x
            options = {"key_padding_mask": call.padding, "incremental_state": call.incremental_state, "need_weights": False}
            options |= {"states": call.states, "reset_mask": call.reset_mask} if takes_states(attention) else {}
            options |= {} if call.shared is None else {"shared": call.shared}
            y, _ = attention(query=x, key=x, value=x, attn_mask=call.mask, **options)
            return self.dropout_module(y)

        return run

    def feed(self, call: Call) -> Callable[[Tensor, Tensor | None], Tensor]:
        """The update of the feed-forward part and of the recurrent units beside it."""

        def run(x: Tensor, source: Tensor | None) -> Tensor:
            inner = self.final_layer_norm(x) if self.normalize_before else x
            y = self.activation_dropout_module(self.activation_fn(self.fc1(inner)))
            y = self.dropout_module(self.fc2(y))
            if self.recurrence is None:
                return y
            return y + self.dropout_module(self.recurrence(x, call.padding, call.incremental_state, call.states, call.reset_mask))

        return run

    def run_in_order(self, x: Tensor, call: Call) -> Tensor:
        """Runs all updates on one stream, with norms before or after them."""
        for update, norm in zip(self.updates(call), self.norms()):
            x = x + update(x, call.source)
            x = x if self.normalize_before else norm(x)
        return x


def takes_states(attention: nn.Module) -> bool:
    """Whether an attention takes the states of streams."""
    return hasattr(attention, "state_before")


def refuse_extras(cfg, option: str) -> None:
    """Refuses parts that fairseq's options add to a layer."""
    for name in EXTRAS:
        if getattr(cfg, name, False):
            raise Mistake(f"{option} does not work with {option_name(name)}; leave one of them out")


def with_noise(attention: nn.Module, cfg) -> nn.Module:
    """Returns the attention with the noise of --quant-noise-pq on its dense layers, as fairseq's attention has it. ``cfg``: options
    of a Transformer."""
    share, block = cfg.quant_noise.pq, cfg.quant_noise.pq_block_size
    for layer in attention.modules():
        if share > 0 and isinstance(layer, nn.Linear):
            if layer.in_features % block:
                raise Mistake(f"--quant-noise-pq-block-size is {block}; it must divide {layer.in_features}, the inputs of a layer")
            quant_noise(layer, share, block)
    return attention
