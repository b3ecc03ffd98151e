"""The parts that models for transformers consist of: embeddings, layers, output, and how their weights are drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import CausalLMOutputWithPast

from ..autograd import is_exporting
from ..errors import Mistake
from ..mixers import MIXERS
from ..mixers.options import DECLARED, FFN_FORMS, NORM_FORMS, check_values
from .layers import ACTIVATIONS, BandedEmbedding, BandedOutput, Cache, Layer, make_norm, scores_of
from .rollback import DRAFTS

POSITIONS = ("none", "learned", "sinusoidal")
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"  # its name changed in 5.24
CUTS_CHUNKS = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 21)  # what a cache has read is in none of them
WITHOUT_EFFECT = ("cache_position", "token_type_ids")  # which transformers passes to every model
UNREAD = {"mixer", "mixer_pattern", "ffn_sru", "ffn_sparsity", "ffn_controller_dim", "qkv_sparsity", "output_sparsity"}
UNREAD |= {"scale_output", "output_dropout", "reversible", "no_decoding_graph", "linear_attention", "decoder_attentions"}
UNREAD |= {"graph_training", "source_in_front", "_name"}  # of fairseq's models, which exported folders have too
OPTIONS = UNREAD.union(DECLARED, *(mixer.options for mixer in MIXERS.values()))


def draw(module: nn.Module) -> None:
    """Draws the weights of embeddings or of an output layer as fairseq does."""
    weights = [part.weight for part in module.modules() if isinstance(part, (nn.Embedding, nn.Linear))]
    for weight in weights:
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)


def mean_loss(logits: Tensor, labels: Tensor | None, shift_labels: Tensor | None, padding: Tensor | None = None) -> Tensor | None:
    """Returns the cross entropy of the labels, which are shifted here, or of labels that are shifted already. padding: (B,T), True
    where a position has read nothing, so that no label counts for it."""
    if labels is not None and shift_labels is not None:
        raise Mistake("labels and shift_labels are both given; give one of them")
    if labels is not None:
        logits, shift_labels = logits[:, :-1], labels[:, 1:]
        if padding is not None:
            shift_labels = shift_labels.masked_fill(padding[:, :-1].to(labels.device), -100)
    if shift_labels is None:
        return None
    return F.cross_entropy(logits.flatten(0, 1).float(), shift_labels.flatten().to(logits.device))


def check_config(config: Any, mixers: Iterable[str]) -> None:
    """Refuses a configuration that no model has. mixers: the names of those that the layers may have."""
    given = [declared for name, declared in DECLARED.items() if config.mixer_options.get(name) is not None]
    check_values(given, config.mixer_options, str)
    bands = {name: sum(count for count, _ in getattr(config, name) or ()) for name in ("input_bands", "output_bands")}
    others: list[tuple[str, Iterable, Iterable]] = [
        ("positions", [config.positions], POSITIONS),
        ("activation", [config.activation], ACTIVATIONS),
        ("norm_form", [config.norm_form], NORM_FORMS),
        ("ffn_form", [config.ffn_form], FFN_FORMS),
        ("mixers", config.mixers, mixers),
        ("the number of mixers", [len(config.mixers)], [config.num_hidden_layers]),
        ("mixer_options", config.mixer_options, sorted(OPTIONS)),
        ("the words of bands", filter(None, bands.values()), [config.vocab_size]),
    ]
    for name, values, allowed in others:
        if wrong := [value for value in values if value not in allowed]:
            raise Mistake(f"{name} is {wrong[0]!r}; it must be one of: {', '.join(map(str, allowed))}")


def caches(model: Any, use_cache: bool | None) -> bool:
    """Returns whether a model returns a cache. Where its caller does not say, not while it trains."""
    return not model.training and getattr(model.config, "use_cache", True) if use_cache is None else use_cache


def cache_of(given: Cache | None, others: dict, inputs: Tensor, keep_state: bool) -> Cache:
    """Returns the cache to continue from, or a new one; refuses caches of other models and of another number of sequences. others:
    further arguments, of which the cache is taken that newer versions of transformers call ``cache``."""
    newer = others.pop("cache", None)
    cache = given if newer is None else newer
    if cache is None or cache == ():
        return Cache(keep_state=keep_state)
    if not isinstance(cache, Cache):
        raise Mistake(f"{CACHE} is a {type(cache).__name__}; it must be what this model returned, or None")
    if cache.tokens is not None and cache.tokens.shape[0] != inputs.shape[0]:
        had = len(cache.tokens)
        raise Mistake(f"{CACHE} is of {had} sequences; it must be of as many as the input has, {len(inputs)}")
    return cache


def padding_of(attention_mask: Tensor | None, inputs: Tensor, name: str = "attention_mask", earlier: bool = False) -> Tensor | None:
    """Returns which of the inputs, (B,T,...), are padding, (B,T); None where none is. With ``earlier``, the mask may have tokens
    before them too."""
    if attention_mask is None:
        return None
    batch, tokens = inputs.shape[:2]
    shape = tuple(attention_mask.shape)
    if len(shape) != 2 or shape[0] != batch or shape[1] < tokens or (shape[1] > tokens and not earlier):
        raise Mistake(f"{name} has the shape {shape}; it must be (batch, tokens), here {(batch, tokens)}, with 0 at padding")
    padding = attention_mask[:, -tokens:].eq(0)
    return padding if padding.any() else None


def refuse_unknown(others: dict) -> None:
    """Refuses arguments that a model does not know, such as ``output_attentions``: there are no attention weights."""
    unknown = [name for name, value in others.items() if name not in WITHOUT_EFFECT and value is not None and value is not False]
    if unknown:
        raise Mistake(f"forward takes no {unknown[0]}; leave it out, or, if you did not give it, install an earlier transformers")


class KeepsState:
    """A model that generates from a cache of its own, ``Cache``."""

    config: Any
    _is_stateful = True  # tokens cannot be taken back, so there is no assisted generation, but where a model says so

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict, *args, **kwargs) -> Any:
        """Adds an empty cache where a prompt is read in chunks, which continue each other. Refuses chunks where transformers cuts
        the mask of a source, leaves embeddings out or reads tokens twice, and where a prompt may end before the last chunk."""
        prepared = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        self.prepare_assisted(generation_config, model_kwargs, *args)
        size, mask, cache = generation_config.prefill_chunk_size, model_kwargs.get("attention_mask"), model_kwargs.get(CACHE)
        if size is None:
            return prepared
        wrong = None
        if self.config.is_encoder_decoder:
            wrong = "a translation model reads its source at once, so leave it out"
        elif model_kwargs.get("inputs_embeds") is not None:
            wrong = "it is for prompts of input_ids, so leave it out with inputs_embeds"
        elif not CUTS_CHUNKS and cache is not None and cache.get_seq_length():
            wrong = "transformers before 5.21 reads again what a cache has read, so leave it out"
        elif mask is not None and mask.shape[-1] > size and mask[..., -1].eq(0).any():
            wrong = "prompts that are read in chunks must be padded on the left"
        if wrong is not None:
            raise Mistake(f"prefill_chunk_size is {size}; {wrong}")
        if generation_config.use_cache is not False and cache is None:
            model_kwargs[CACHE] = Cache()
        return prepared

    def prepare_assisted(self, generation_config: Any, model_kwargs: dict, mode: Any = None, *unused: Any) -> None:
        """Adds a cache that can take back tokens where they are drafts: of the model that checks them, and of the one that makes
        them."""
        drafts = getattr(generation_config, "is_assistant", False)
        if not self._is_stateful and (drafts or getattr(mode, "value", None) == "assisted_generation"):
            model_kwargs[CACHE] = model_kwargs.get(CACHE) or Cache()
            model_kwargs[CACHE].remember(max(DRAFTS, generation_config.max_new_tokens or 0))


class Embeds:
    """A module that embeds tokens and their positions."""

    config: Any
    embed_tokens: Any

    def make_embeddings(self, config: Any) -> None:
        """Adds the embeddings to this module."""
        self.config = config
        width, size_in = config.hidden_size, config.input_size or config.hidden_size
        words = config.vocab_size
        self.embed_tokens = BandedEmbedding(config.input_bands, size_in) if config.input_bands else nn.Embedding(words, size_in)
        self.project_in = nn.Linear(size_in, width, bias=False) if size_in != width else None
        rows = config.first_position + (config.max_position_embeddings or 0)
        self.embed_positions = nn.Embedding(rows, width) if config.positions == "learned" else None
        self.embedding_norm = make_norm(config) if config.embedding_norm else None

    def embeddings_of(self, ids: Tensor | None, embeds: Tensor | None, name: str = "input_ids") -> Tensor:
        """Returns the embeddings (B,T,C) of the ids (B,T), or those that are given in their place."""
        if (ids is None) == (embeds is None):
            raise Mistake(f"forward takes either {name} or {name.replace('input_ids', 'inputs_embeds')}")
        x = self.embed_tokens(ids) if embeds is None else embeds
        if x.dim() != 3 or not x.shape[1]:
            raise Mistake(f"{name} has the shape {tuple(x.shape if ids is None else ids.shape)}; it must be (batch, tokens)")
        return x

    def embed(
        self, inputs: Tensor, padding: Tensor | None, position_ids: Tensor | None, before: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns embeddings (B,T,C), how many tokens each sequence has now, and where new texts begin after others, (B,T)."""
        real = inputs.new_ones(inputs.shape[:2], dtype=torch.long) if padding is None else (~padding).long()
        place = real.cumsum(1) + (0 if before is None else before[:, None])
        resets = None
        if position_ids is not None:
            resets = position_ids.eq(0) & place.gt(1) & real.bool()
            resets = resets if resets.any() else None
        x = inputs * self.config.embedding_scale
        x = x if self.project_in is None else self.project_in(x)
        if self.config.positions != "none":
            positions = (place - 1).clamp(min=0) if position_ids is None else position_ids
            x = x + self.positions(positions + self.config.first_position).to(x.dtype)
        return x if self.embedding_norm is None else self.embedding_norm(x), place[:, -1], resets

    def positions(self, place: Tensor) -> Tensor:
        """Returns the embeddings of positions, learned or sinusoidal."""
        if self.embed_positions is not None:
            if not is_exporting() and int(place.max()) >= self.embed_positions.num_embeddings:
                limit = self.embed_positions.num_embeddings - self.config.first_position
                raise Mistake(f"input_ids is longer than max_position_embeddings, {limit} tokens; give fewer")
            return self.embed_positions(place)
        half = self.config.hidden_size // 2
        rates = torch.exp(torch.arange(half, device=place.device) * -(math.log(10000) / (half - 1)))
        angles = place.unsqueeze(-1) * rates
        return F.pad(torch.cat([angles.sin(), angles.cos()], -1), (0, self.config.hidden_size % 2))


class Decodes(Embeds):
    """A module that embeds tokens, mixes them in layers, and scores the words that may follow."""

    layers: Any
    output: Any

    def make_layers(self, config: Any, kind: type[Layer], *options) -> None:
        """Adds layers and output to this module. kind: the class of the layers, which gets the options."""
        check_config(config, (*MIXERS, "softmax"))
        width, size_out = config.hidden_size, config.output_size or config.hidden_size
        self.layers = nn.ModuleList(kind(config, i, *options) for i in range(config.num_hidden_layers))
        self.layer_norm = make_norm(config) if config.final_norm else None
        self.project_out = nn.Linear(width, size_out, bias=False) if size_out != width else None
        tied = config.tie_word_embeddings
        self.output = (
            BandedOutput(config.output_bands, size_out, tied)
            if config.output_bands
            else None if tied else nn.Linear(size_out, config.vocab_size, bias=False)
        )  # fmt: skip

    def through_layers(
        self, x: Tensor, padding: Tensor | None, resets: Tensor | None, cache: Cache, tokens: Tensor, *source: Tensor | None
    ) -> list[Tensor]:
        """Returns the input of each layer and of the output, (B,T,C), and leaves the states after the last token in the cache.
        source: what else the layers take."""
        states: dict[int, Any] = {}
        hidden, before = [x], cache.states
        shares = any(layer.self_attn.takes_shared for layer in self.layers)
        more: tuple = (*source, {}) if shares else source
        for i, layer in enumerate(self.layers):
            y, states[i] = layer(hidden[-1].transpose(0, 1), before.get(i), padding, resets, cache.keep_state, *more)
            if layer.channel_mixing is not None:
                second = len(self.layers) + i
                y, states[second] = layer.mix_channels(y, before.get(second), padding, resets)
            hidden.append(y.transpose(0, 1))
        cache.states, cache.tokens, cache.length = states, tokens, cache.length + x.shape[1]
        hidden[-1] = hidden[-1] if self.layer_norm is None else self.layer_norm(hidden[-1])
        return hidden

    def scores(self, x: Tensor) -> Tensor:
        """Maps hidden states to logits, or to log probabilities with an adaptive vocabulary."""
        x = (x if self.project_out is None else self.project_out(x)) * self.config.output_scale
        if isinstance(self.output, BandedOutput):
            return self.output(x, self.embed_tokens)
        return scores_of(x, self.embed_tokens) if self.output is None else self.output(x)


class Drawn:
    """A model whose weights are drawn as fairseq draws them."""

    @torch.no_grad()
    def draw_as_fairseq(self: Any) -> None:
        """Draws embeddings and output. The other modules have drawn their own weights."""
        for module in self.modules():
            if isinstance(module, nn.Embedding) or module is self.get_output_embeddings():
                draw(module)
        self._drawn = not next(self.parameters()).is_meta

    @torch.no_grad()
    def _init_weights(self: Any, module: nn.Module) -> None:
        """Draws what a checkpoint lacks, for which transformers has only allocated memory, and a vocabulary that was resized."""
        if all(module is not part for part in self.modules()):
            draw(module)
        elif not self._drawn and not next(self.parameters()).is_meta:
            self._drawn = True
            fresh = type(self)(self.config)
            drawn = dict(fresh.named_parameters()) | dict(fresh.named_buffers())
            for name, x in (*self.named_parameters(), *self.named_buffers()):
                if not getattr(x, "_is_hf_initialized", False):
                    x.copy_(drawn[name])
