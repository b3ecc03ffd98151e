"""fast_weight_lm for Hugging Face transformers, without fairseq. ``fw-export-hf`` writes its weights.

Its cache is the mixers' state, so ``generate`` takes the same time and memory for every token, and reads a prompt in one
pass.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from . import Mistake
from .mixers import MIXERS
from .ops.state import tensor_state

ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_accurate": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "relu_squared": lambda x: F.relu(x).square(),
    "swish": F.silu,
    "tanh": torch.tanh,
    "linear": lambda x: x,
}


class FastWeightHFConfig(PretrainedConfig):
    """The sizes and options of an exported model.

    ``mixers`` has one name for each layer, and ``mixer_options`` the options of FastWeightConfig. Widths and norms are as in
    fairseq's decoder. ``input_bands`` and ``output_bands`` give (words, width) of each cluster of an adaptive vocabulary.
    """

    model_type = "fw_fairseq"

    def __init__(
        self,
        vocab_size=8,
        hidden_size=8,
        input_size=None,
        output_size=None,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        mixers=("fast_weight",),
        mixer_options=None,
        activation="relu",
        normalize_before=True,
        final_norm=True,
        embedding_norm=False,
        embedding_scale=1.0,
        output_scale=1.0,
        positions="none",
        max_position_embeddings=None,
        first_position=0,
        input_bands=None,
        output_bands=None,
        tie_word_embeddings=True,
        **kwargs,
    ):
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
        given = {name: value for name, value in locals().items() if name not in ("self", "kwargs", "__class__")}
        for name, value in given.items():
            setattr(self, name, value)
        self.mixers, self.mixer_options = list(mixers), dict(mixer_options or {})


@tensor_state
class KeysAndValues(NamedTuple):
    """The state of softmax attention, which grows with every token."""

    keys: Tensor
    values: Tensor
    hidden: Tensor  # True at padding


class SoftmaxAttention(nn.Module):
    """fairseq's attention with the interface of a mixer, for the softmax layers of a hybrid."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, state: KeysAndValues | None = None, padding_mask=None):
        """Maps x (T,B,C) to y (T,B,C) and the state after the last token."""
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).permute(1, 2, 0, 3) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        hidden = torch.zeros(x.shape[1], x.shape[0], dtype=torch.bool, device=x.device) if padding_mask is None else padding_mask
        if state is not None:
            before = (state.keys, state.values)
            k, v = (torch.cat(pair, 2) for pair in zip(before, (k, v)))
            hidden = torch.cat([state.hidden, hidden], 1)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=x.device).tril(k.shape[2] - q.shape[2])
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen & ~hidden[:, None, None])
        return self.out_proj(y.nan_to_num().permute(2, 0, 1, 3).flatten(2)), KeysAndValues(k, v, hidden)


class Cache:
    """The state that ``generate`` keeps between tokens: the state of each layer, and how many tokens each sequence has read."""

    is_compileable = False

    def __init__(self):
        self.states: dict[int, object] = {}
        self.tokens: Tensor | None = None  # (B,)
        self.length = 0  # with padding

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns how many tokens were read, padding included."""
        return self.length

    def reorder_cache(self, order: Tensor) -> None:
        """Replaces the states by those of the sequences ``order``, for beam search."""
        self.states = {layer: state.index_select(order) for layer, state in self.states.items()}
        self.tokens = self.tokens.index_select(0, order)


class Layer(nn.Module):
    """A mixer and a feed-forward network, as in fairseq's decoder."""

    def __init__(self, config: FastWeightHFConfig, index: int):
        super().__init__()
        width, heads, inner, name = config.hidden_size, config.num_attention_heads, config.intermediate_size, config.mixers[index]
        options = SimpleNamespace(**config.mixer_options)
        softmax = name == "softmax"
        self.self_attn = (
            SoftmaxAttention(width, heads)
            if softmax
            else MIXERS[name].of_layer(width, heads, options, index, config.num_hidden_layers)
        )
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = (nn.Linear(width, inner), nn.Linear(inner, width)) if inner else (None, None)
        self.final_layer_norm = nn.LayerNorm(width) if inner else None
        self.activation, self.before = ACTIVATIONS[config.activation], config.normalize_before

    def forward(self, x: Tensor, state, padding_mask: Tensor | None):
        """Maps x (T,B,C) to the output (T,B,C) and the mixer's state after the last token."""
        y, state = self.self_attn(self.self_attn_layer_norm(x) if self.before else x, state, padding_mask=padding_mask)
        x = x + y if self.before else self.self_attn_layer_norm(x + y)
        if self.fc1 is None:
            return x, state
        y = self.fc2(self.activation(self.fc1(self.final_layer_norm(x) if self.before else x)))
        return x + y if self.before else self.final_layer_norm(x + y), state


class BandedEmbedding(nn.Module):
    """Embeddings whose width depends on the band of the word: frequent words are wider. Ids are numbered through all bands."""

    def __init__(self, bands, width: int):
        super().__init__()
        self.words = nn.ModuleList(nn.Embedding(count, size) for count, size in bands)
        self.maps = nn.ModuleList(nn.Linear(size, width, bias=False) for _, size in bands)

    def forward(self, ids: Tensor) -> Tensor:
        """Maps ids to embeddings of one width."""
        result, start = self.maps[0].weight.new_zeros(*ids.shape, self.maps[0].out_features), 0
        for words, linear in zip(self.words, self.maps):
            mine = (ids >= start) & (ids < start + words.num_embeddings)
            result[mine] = linear(words(ids[mine] - start))
            start += words.num_embeddings
        return result


class BandedOutput(nn.Module):
    """The output layer of an adaptive vocabulary. With ``tied``, it uses the input's embeddings."""

    def __init__(self, bands, width: int, tied: bool):
        super().__init__()
        self.maps = nn.ModuleList(
            nn.Linear(width, size, bias=False) if size != width or i else None for i, (_, size) in enumerate(bands)
        )
        self.words = None if tied else nn.ModuleList(nn.Linear(size, count, bias=False) for count, size in bands)
        self.bands = nn.Linear(width, len(bands) - 1, bias=False)

    def forward(self, x: Tensor, embedding: BandedEmbedding) -> Tensor:
        """Returns log probabilities of all words."""
        words = self.words if self.words is not None else embedding.words
        scores = [F.linear(x if mapped is None else mapped(x), band.weight) for mapped, band in zip(self.maps, words)]
        first = torch.cat([scores[0], self.bands(x)], -1).log_softmax(-1)
        chosen = first[..., scores[0].shape[-1] :].split(1, dim=-1)
        return torch.cat([first[..., : scores[0].shape[-1]], *(p + s.log_softmax(-1) for p, s in zip(chosen, scores[1:]))], -1)


class FastWeightForCausalLM(PreTrainedModel, GenerationMixin):
    """The language model as transformers loads it."""

    config_class = FastWeightHFConfig
    base_model_prefix = "model"
    _no_split_modules = ["Layer"]  # noqa: RUF012
    _is_stateful = True  # tokens cannot be taken back, so there is no assisted generation
    accepts_loss_kwargs = False  # the loss is a mean, so Trainer divides it by the number of accumulated steps

    def __init__(self, config: FastWeightHFConfig):
        super().__init__(config)
        width = config.hidden_size
        size_in, size_out = config.input_size or width, config.output_size or width
        words = config.vocab_size
        self.embed_tokens = BandedEmbedding(config.input_bands, size_in) if config.input_bands else nn.Embedding(words, size_in)
        self.project_in = nn.Linear(size_in, width, bias=False) if size_in != width else None
        rows = config.first_position + (config.max_position_embeddings or 0)
        self.embed_positions = nn.Embedding(rows, width) if config.positions == "learned" else None
        self.embedding_norm = nn.LayerNorm(width) if config.embedding_norm else None
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.layer_norm = nn.LayerNorm(width) if config.final_norm else None
        self.project_out = nn.Linear(width, size_out, bias=False) if size_out != width else None
        tied = config.tie_word_embeddings
        self.output = (
            BandedOutput(config.output_bands, size_out, tied)
            if config.output_bands
            else None if tied else nn.Linear(size_out, words, bias=False)
        )  # fmt: skip
        self.post_init()

    def _init_weights(self, module) -> None:
        """Does nothing, because each module draws its own weights."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # it makes its own Cache

    def get_input_embeddings(self):
        """Returns the embeddings of the input."""
        return self.embed_tokens

    def set_input_embeddings(self, value) -> None:
        """Replaces the embeddings of the input."""
        self.embed_tokens = value

    def get_output_embeddings(self):
        """Returns the output layer, or None if the input's embeddings serve."""
        return self.output  # None: the input's embeddings serve

    def set_output_embeddings(self, value) -> None:
        """Replaces the output layer."""
        self.output = value

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args, **kwargs):
        """Resizes the vocabulary; an adaptive vocabulary keeps its size."""
        if new_num_tokens is not None and (self.config.input_bands or self.config.output_bands):
            raise Mistake(f"new_num_tokens is {new_num_tokens}; an adaptive vocabulary keeps its size, {self.config.vocab_size}")
        return super().resize_token_embeddings(new_num_tokens, *args, **kwargs)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        **unused,
    ) -> CausalLMOutputWithPast:
        """Returns the logits of the next token; with an adaptive vocabulary they are log probabilities.

        attention_mask: 0 at padding, on either side. past_key_values: the cache to continue from; its tokens must not be
        given again. labels: the ids, -100 where there is none.
        """
        if labels is not None and logits_to_keep:
            raise Mistake(f"logits_to_keep is {logits_to_keep}; labels need the logits of all tokens, so leave it at 0")
        cache = past_key_values or Cache()
        padding = None if attention_mask is None else attention_mask[:, -input_ids.shape[1] :].eq(0)
        padding = padding if padding is not None and padding.any() else None
        x, tokens = self.embed(input_ids, padding, cache.tokens)
        x, states = x.transpose(0, 1), {}
        for i, layer in enumerate(self.layers):
            x, states[i] = layer(x, cache.states.get(i), padding)
        cache.states, cache.tokens, cache.length = states, tokens, cache.length + input_ids.shape[1]
        x = x.transpose(0, 1)[:, -logits_to_keep:]
        logits = self.scores(x if self.layer_norm is None else self.layer_norm(x))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        kept = cache if (not self.training if use_cache is None else use_cache) else None
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=kept)

    def embed(self, ids: Tensor, padding: Tensor | None, before: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns embeddings (B,T,C) and how many tokens each sequence has now."""
        real = torch.ones_like(ids) if padding is None else (~padding).long()
        place = real.cumsum(1) + (0 if before is None else before[:, None])
        x = self.embed_tokens(ids) * self.config.embedding_scale
        x = x if self.project_in is None else self.project_in(x)
        if self.config.positions != "none":
            x = x + self.positions((place - 1).clamp(min=0) + self.config.first_position).to(x.dtype)
        return x if self.embedding_norm is None else self.embedding_norm(x), place[:, -1]

    def positions(self, place: Tensor) -> Tensor:
        """Returns the embeddings of positions, learned or sinusoidal."""
        if self.embed_positions is not None:
            if int(place.max()) >= self.embed_positions.num_embeddings:
                limit = self.embed_positions.num_embeddings - self.config.first_position
                raise Mistake(f"input_ids is longer than max_position_embeddings, {limit} tokens; give fewer")
            return self.embed_positions(place)
        half = self.config.hidden_size // 2
        rates = torch.exp(torch.arange(half, device=place.device) * -(math.log(10000) / (half - 1)))
        angles = place.unsqueeze(-1) * rates
        return F.pad(torch.cat([angles.sin(), angles.cos()], -1), (0, self.config.hidden_size % 2))

    def scores(self, x: Tensor) -> Tensor:
        """Maps hidden states to logits, or to log probabilities with an adaptive vocabulary."""
        x = (x if self.project_out is None else self.project_out(x)) * self.config.output_scale
        if isinstance(self.output, BandedOutput):
            return self.output(x, self.embed_tokens)
        return F.linear(x, self.embed_tokens.weight) if self.output is None else self.output(x)
