"""A decoder's step of generation, from the tokens to the features, without the general path through fairseq's decoder."""

from __future__ import annotations

from collections.abc import Callable

import torch
from fairseq.utils import get_activation_fn
from torch import Tensor, nn
from torch.nn import functional as F

from ..modules import FastWeightDecoderLayer, LinearAttention, MixerAttention
from .source import SourceReader
from .steppers import make_stepper

GENERATION = "generation"  # its key in fairseq's incremental state
RELU = get_activation_fn("relu")
UNKNOWN_PARTS = ("attn_ln", "ffn_layernorm", "w_resid", "c_attn")  # options of fairseq's layer


def plain(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The module's function without what modules do around it, which takes as long as the function for a few rows."""
    if type(module) is nn.Linear:
        return lambda x: F.linear(x, module.weight, module.bias)
    if type(module) is nn.LayerNorm:
        return lambda x: torch.layer_norm(x, module.normalized_shape, module.weight, module.bias, module.eps)
    return module


class LayerStep:
    """One decoder layer that reads one token of each row at a time."""

    def __init__(self, layer: FastWeightDecoderLayer, state, incremental_state: dict, encoder_out: dict | None):
        self.source, self.source_norm = None, None
        if layer.encoder_attn is not None and encoder_out is not None:
            self.source = SourceReader(layer.encoder_attn, incremental_state, encoder_out)
            self.source_norm = plain(layer.encoder_attn_layer_norm)
        self.stepper = make_stepper(layer.self_attn.mixer, state)
        self.attention, self.before = layer.self_attn, layer.normalize_before
        self.mixer_norm, self.end_norm = plain(layer.self_attn_layer_norm), plain(layer.final_layer_norm)
        self.fc1, self.fc2 = plain(layer.fc1), plain(layer.fc2)
        own = type(layer.fc1) is nn.Linear and layer.activation_fn is RELU  # a result of its own, which may be changed
        self.activation = torch.relu_ if own else layer.activation_fn

    @staticmethod
    def fits(layer: nn.Module) -> bool:
        """Whether the layer has a mixer, and no other part than those that ``__call__`` knows."""
        return (
            isinstance(layer, FastWeightDecoderLayer)
            and isinstance(layer.self_attn, MixerAttention)
            and not layer.self_attn.mixer.norms_residual
            and isinstance(layer.encoder_attn, (LinearAttention, type(None)))
            and all(getattr(layer, part) is None for part in UNKNOWN_PARTS)
            and not any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules())
        )

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x (R,C) to the layer's output (R,C)."""
        if self.before:
            x = x + self.stepper(self.mixer_norm(x))
            if self.source is not None:
                x.add_(self.source(self.source_norm(x)))
            return x.add_(self.fc2(self.activation(self.fc1(self.end_norm(x)))))
        x = self.mixer_norm(self.stepper(x).add_(x))
        if self.source is not None:
            x = self.source_norm(self.source(x).add_(x))
        return self.end_norm(self.fc2(self.activation(self.fc1(x))).add_(x))


class Generation:
    """The states of one generation: all rows read their next token together, and every layer changes its state in place.

    It takes the states in fairseq's ``incremental_state``, where the prompt left them, and ``release`` puts them back.
    """

    def __init__(self, decoder, incremental_state: dict, encoder_out: dict | None = None):
        self.decoder = decoder
        self.layers = []
        for layer in decoder.layers:
            key = layer.self_attn._get_full_incremental_state_key("mixer")
            self.layers.append(LayerStep(layer, incremental_state.pop(key, None), incremental_state, encoder_out))
        positions = decoder.embed_positions
        self.table = None
        if positions is not None:
            self.table = positions.weight if isinstance(positions, nn.Embedding) else positions.weights

    @staticmethod
    def fits(decoder) -> bool:
        """Whether the decoder has no other part than those that ``features`` and ``LayerStep`` know, and no gradient is wanted."""
        general = decoder.training or torch.is_grad_enabled() or torch.is_autocast_enabled(next(decoder.parameters()).device.type)
        return not general and decoder.quant_noise is None and all(map(LayerStep.fits, decoder.layers))

    def features(self, tokens: Tensor) -> Tensor:
        """Maps the rows' tokens so far, (R,T), to the features at the last one, (R,1,C). All before it have been read."""
        return self.read(tokens[:, -1], None if self.table is None else self.position(tokens)).unsqueeze(1)

    def read(self, tokens: Tensor, position: Tensor | None) -> Tensor:
        """Maps tokens (R) and the embedding of their position to features (R,C)."""
        decoder = self.decoder
        x = decoder.embed_tokens(tokens)
        if decoder.embed_scale != 1:
            x = x * decoder.embed_scale
        if decoder.project_in_dim is not None:
            x = decoder.project_in_dim(x)
        if position is not None:
            x = x + position
        if decoder.layernorm_embedding is not None:
            x = decoder.layernorm_embedding(x)
        for layer in self.layers:
            x = layer(x)
        if decoder.layer_norm is not None:
            x = decoder.layer_norm(x)
        if decoder.project_out_dim is not None:
            x = decoder.project_out_dim(x)
        return x

    def position(self, tokens: Tensor) -> Tensor:
        """The embedding of the last token's position. fairseq's module makes those beyond its table, or refuses them."""
        row = self.decoder.padding_idx + tokens.shape[1]
        if row < len(self.table):
            return self.table[row]
        return self.decoder.embed_positions(tokens, incremental_state={})[:, -1]

    def states(self) -> list:
        """The states of the layers after the last token."""
        return [layer.stepper.state() for layer in self.layers]

    def reorder(self, order: Tensor) -> None:
        """Gives row i the states of row ``order[i]``."""
        for layer in self.layers:
            layer.stepper.reorder(order)
            if layer.source is not None:
                layer.source.reorder(order)

    def release(self, incremental_state: dict) -> None:
        """Puts the states where the layers' general path looks for them."""
        for layer, state in zip(self.layers, self.states()):
            layer.attention._set_input_buffer(incremental_state, state)
