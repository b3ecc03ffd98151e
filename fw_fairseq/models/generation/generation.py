"""A decoder's step of generation, from the tokens to the features, without the general path through fairseq's decoder."""

from __future__ import annotations

from typing import Any

import torch
from fairseq.modules import FairseqDropout
from torch import Tensor, nn

from ...feature_maps import wide
from ...generation.base import check_rows
from ...generation.steppers import share
from .layers import has_step, layer_step

GENERATION = "generation"  # its key in fairseq's incremental state


class Generation:
    """The states of one generation: all rows read their next token together, and every layer changes its state in place.

    It takes the states in fairseq's ``incremental_state``, where the prompt left them, and ``release`` puts them back. A copy, or a
    pickle, is a dictionary of the states alone, from which ``generation_in`` lets the same decoder go on.
    """

    def __init__(self, decoder: Any, incremental_state: dict, encoder_out: dict | None = None) -> None:
        self.decoder = decoder
        self.held: int | None = None  # the rows that the states have, from the first token on
        self.layers = [layer_step(layer, incremental_state, encoder_out) for layer in decoder.layers.children()]
        share([layer.stepper for layer in self.layers])
        positions = decoder.embed_positions
        self.table: Any = None
        if positions is not None:
            self.table = positions.weight if isinstance(positions, nn.Embedding) else positions.weights

    @staticmethod
    def fits(decoder: Any) -> bool:
        """Whether the decoder has no other part than those that ``features`` and ``layer_step`` know, drops nothing, and no
        gradient is wanted."""
        general = decoder.training or torch.is_grad_enabled() or torch.is_autocast_enabled(next(decoder.parameters()).device.type)
        general = general or any(isinstance(part, FairseqDropout) and part.apply_during_inference for part in decoder.modules())
        return not general and decoder.quant_noise is None and all(map(has_step, decoder.layers.children()))

    def __reduce__(self) -> tuple:
        states: dict = {}
        self.release(states)
        return dict, (states,)

    def features(self, tokens: Tensor) -> Tensor:
        """Maps the rows' tokens so far, (R,T), to the features at the last one, (R,1,C). All before it have been read."""
        if self.held is not None and self.held != len(tokens):  # before the first layer changes its state
            check_rows(len(tokens), self.held)
        self.held = len(tokens)
        return self.read(tokens[:, -1], None if self.table is None else self.position(tokens)).unsqueeze(1)

    def read(self, tokens: Tensor, position: Tensor | None = None) -> Tensor:
        """Maps tokens (R) and the embedding of their position, (C), to features (R,C)."""
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
        x = self.through_layers(x)
        if decoder.layer_norm is not None:
            x = decoder.layer_norm(x)
        if decoder.project_out_dim is not None:
            x = decoder.project_out_dim(x)
        return x

    def position(self, tokens: Tensor) -> Tensor:
        """The embedding of the last token's position, (C). fairseq's module makes those beyond its table, or refuses them."""
        row = self.decoder.padding_idx + tokens.shape[1]
        if row < len(self.table):
            return self.table[row]
        return self.decoder.embed_positions(tokens, incremental_state={})[0, -1]

    def through_layers(self, x: Tensor) -> Tensor:
        """Maps x (R,C) to the output of the last layer, or to the mean of the streams of reversible layers."""
        if not self.decoder.reversible:
            for layer in self.layers:
                x = layer(x)
            return x
        first = second = wide(x)
        for layer in self.layers:
            for part in layer.parts:
                first, second = second, first + part(second.to(x.dtype))
        return ((first + second) / 2).to(x.dtype)

    def parts(self) -> list:
        """The parts of all layers."""
        return [part for layer in self.layers for part in layer.parts]

    def owned_states(self) -> list[tuple[Any, Any]]:
        """The states of all parts after the last token, with the modules that they belong to."""
        found = [pair for part in self.parts() for pair in part.states()]
        return [(owner, state) for owner, state in found if state is not None]

    def states(self) -> list:
        """The states alone."""
        return [state for _, state in self.owned_states()]

    def reorder(self, order: Tensor) -> None:
        """Gives row i the states of row ``order[i]``."""
        self.held = len(order)
        for part in self.parts():
            part.reorder(order)

    def release(self, incremental_state: dict) -> None:
        """Puts the states where the layers' general path looks for them."""
        for owner, state in self.owned_states():
            owner._set_input_buffer(incremental_state, state)


def generation_in(incremental_state: dict) -> Generation | bool | None:
    """The generation that holds the states; False where the decoder has parts that none knows, None where there is none yet. Where
    ``incremental_state`` is a copy, its states go where the layers' general path, and a new generation, look for them."""
    if isinstance(incremental_state.get(GENERATION), dict):
        incremental_state.update(incremental_state.pop(GENERATION))
    return incremental_state.get(GENERATION)
