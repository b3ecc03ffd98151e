"""The two sides of a translation model: the encoder, and the decoder that looks at what the encoder returns."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import can_return_tuple

from ..mixers.options import MixerOptions
from ..mixers.parts.source import SourceMemory
from ..ops.state import tensor_state
from .configuration import FastWeightHFConfig
from .layers import Layer
from .parts import Decodes, Embeds, check_config, padding_of, refuse_unknown


@tensor_state
class Sentence(NamedTuple):
    """The keys and values of a source."""

    keys: Tensor  # (B,H,S,D)
    values: Tensor
    hidden: Tensor | None  # (B,S), True at padding


class SoftmaxSource(nn.Module):
    """Softmax attention to a whole sentence, with the interface of ``SourceMemory``."""

    def __init__(self, width: int, heads: int, source_width: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.k_proj, self.v_proj = (nn.Linear(source_width or width, width) for _ in range(2))

    def split(self, x: Tensor) -> Tensor:
        """Maps (T,B,C) to (B,H,T,D)."""
        return x.unflatten(-1, (self.heads, -1)).permute(1, 2, 0, 3)

    def summarise(self, source: Tensor, padding_mask: Tensor | None) -> Sentence:
        """Returns the keys and values of a source (S,B,C')."""
        return Sentence(self.split(self.k_proj(source)), self.split(self.v_proj(source)), padding_mask)

    def read(self, query: Tensor, source: Sentence) -> Tensor:
        """Returns the values that the queries (T,B,C) read."""
        seen = None if source.hidden is None else ~source.hidden[:, None, None]
        y = F.scaled_dot_product_attention(self.split(self.q_proj(query)), source.keys, source.values, attn_mask=seen)
        return y.permute(2, 0, 1, 3).flatten(2)


def attention(config: FastWeightHFConfig, linear: bool, source_width: int | None = None) -> nn.Module:
    """Returns attention to a whole sentence."""
    width, heads = config.hidden_size, config.num_attention_heads
    if not linear:
        return SoftmaxSource(width, heads, source_width)
    return SourceMemory(width, heads, MixerOptions.of(config.mixer_options), source_width)


class EncoderLayer(Layer):
    """Attention of a sentence to itself, and a feed-forward network."""

    def make_mixer(self, config: FastWeightHFConfig, index: int) -> nn.Module:
        return attention(config, config.mixers[index] == "linear")

    def compute(self, x: Tensor, padding_mask: Tensor | None) -> Tensor:  # type: ignore[override]
        """Maps x (S,B,C) to the output (S,B,C)."""
        inner = self.self_attn_layer_norm(x) if self.before else x
        y = self.self_attn.out_proj(self.self_attn.read(inner, self.self_attn.summarise(inner, padding_mask)))
        return self.feed(x + y if self.before else self.self_attn_layer_norm(x + y))


class Encoder(Embeds, nn.Module):
    """Maps a source to what the decoder looks at."""

    main_input_name = "input_ids"

    def __init__(self, config: FastWeightHFConfig) -> None:
        super().__init__()
        check_config(config, ("linear", "softmax"))
        self.make_embeddings(config)
        self.layers = nn.ModuleList(EncoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.layer_norm = nn.LayerNorm(config.hidden_size) if config.final_norm else None

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **others,
    ) -> BaseModelOutput | tuple:
        """Returns the outputs of the last layer, (B,S,C). attention_mask: 0 at padding, on either side."""
        refuse_unknown(others)
        inputs = self.embeddings_of(input_ids, inputs_embeds)
        padding = padding_of(attention_mask, inputs)
        x, _, _ = self.embed(inputs, padding, None, None)
        hidden = [x]
        for layer in self.layers:
            hidden.append(layer(hidden[-1].transpose(0, 1), padding).transpose(0, 1))
        hidden[-1] = hidden[-1] if self.layer_norm is None else self.layer_norm(hidden[-1])
        return BaseModelOutput(last_hidden_state=hidden[-1], hidden_states=tuple(hidden) if output_hidden_states else None)


class BothStates(NamedTuple):
    """The states of one decoder layer: its mixer's, and the memory of the source."""

    own: Any
    source: Any

    def index_select(self, order: Tensor) -> BothStates:
        return BothStates(self.own.index_select(order), self.source.index_select(order))


class DecoderLayer(Layer):
    """A mixer, attention to the source and a feed-forward network. A source is read once: its memory is part of the state."""

    encoder_attn: Any

    def __init__(self, config: FastWeightHFConfig, index: int, linear: bool, source_width: int) -> None:
        super().__init__(config, index)
        self.encoder_attn = attention(config, linear, source_width)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.hidden_size)

    def compute(  # type: ignore[override]
        self,
        x: Tensor,
        state: BothStates | None,
        padding_mask: Tensor | None,
        reset_mask: Tensor | None,
        keep_state: bool,
        source: Tensor | None,
        source_padding: Tensor | None,
    ) -> tuple[Tensor, BothStates]:
        """Maps x (T,B,C) to the output (T,B,C) and the states after the last token. source: (S,B,C'); with a state it is not
        looked at."""
        own, memory = state or (None, None)
        x, own = self.mix(x, own, padding_mask, reset_mask, keep_state)
        if memory is None:
            memory = self.encoder_attn.summarise(source, source_padding)
        inner = self.encoder_attn_layer_norm(x) if self.before else x
        y = self.encoder_attn.out_proj(self.encoder_attn.read(inner, memory))
        return self.feed(x + y if self.before else self.encoder_attn_layer_norm(x + y)), BothStates(own, memory)


class Decoder(Decodes, nn.Module):
    """Scores the words of a translation."""

    def __init__(self, config: FastWeightHFConfig, linear_cross: bool, source_width: int) -> None:
        super().__init__()
        self.make_embeddings(config)
        self.make_layers(config, DecoderLayer, linear_cross, source_width)
