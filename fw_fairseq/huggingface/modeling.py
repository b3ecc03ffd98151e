"""fast_weight_lm as transformers loads it.

Its cache is the mixers' state, so ``generate`` takes the same time and memory for every token, and reads a prompt in one
pass.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .. import Mistake
from .configuration import FastWeightHFConfig
from .layers import BandedEmbedding, BandedOutput, Cache, Layer
from .prompts import read as read_prompts

WITHOUT_EFFECT = ("cache_position", "token_type_ids")  # which transformers passes to every model


def draw(module: nn.Module) -> None:
    """Draws the weights of embeddings or of an output layer as fairseq does."""
    weights = [part.weight for part in module.modules() if isinstance(part, (nn.Embedding, nn.Linear))]
    for weight in weights:
        nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)


def mean_loss(logits: Tensor, labels: Tensor | None, shift_labels: Tensor | None) -> Tensor | None:
    """Returns the cross entropy of the labels, which are shifted here, or of labels that are shifted already."""
    if labels is not None:
        logits, shift_labels = logits[:, :-1], labels[:, 1:]
    if shift_labels is None:
        return None
    return F.cross_entropy(logits.flatten(0, 1).float(), shift_labels.flatten().to(logits.device))


class FastWeightForCausalLM(PreTrainedModel, GenerationMixin):
    """The language model as transformers loads it."""

    config_class = FastWeightHFConfig
    base_model_prefix = "model"
    _no_split_modules = ["Layer"]  # noqa: RUF012
    _is_stateful = True  # tokens cannot be taken back, so there is no assisted generation
    supports_gradient_checkpointing = True
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
        self.draw_as_fairseq()
        self._drawn = not next(self.parameters()).is_meta
        self.post_init()

    @torch.no_grad()
    def draw_as_fairseq(self) -> None:
        """Draws embeddings and output. The other modules have drawn their own weights."""
        for module in self.modules():
            if isinstance(module, nn.Embedding) or module is self.output:
                draw(module)

    @torch.no_grad()
    def _init_weights(self, module) -> None:
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
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        decoding_graph: bool | None = None,
        **others,
    ) -> CausalLMOutputWithPast | tuple:
        """Returns the logits of the next token; with an adaptive vocabulary they are log probabilities.

        attention_mask: 0 at padding, on either side. position_ids: a token at position 0 begins a new text, which does not see the
        one before it. past_key_values: the cache to continue from; its tokens must not be given again. inputs_embeds: what the
        input embeddings return, in place of input_ids. labels: the ids, -100 where there is none. shift_labels: the id that each
        position is to predict, in place of labels. decoding_graph: whether a GPU generates with CUDA graphs; ``generate`` takes it,
        too.
        """
        self.check(labels, shift_labels, logits_to_keep, input_ids, inputs_embeds, output_attentions, others)
        inputs = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values or Cache()
        padding = None if attention_mask is None else attention_mask[:, -inputs.shape[1] :].eq(0)
        padding = padding if padding is not None and padding.any() else None
        x, tokens, resets = self.embed(inputs, padding, position_ids, cache.tokens)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        graph = self.config.decoding_graph if decoding_graph is None else decoding_graph
        generates = not (torch.is_grad_enabled() or self.training or wanted) and resets is None
        last = self.generation(x, padding, cache, tokens, graph) if generates else None
        hidden = self.through_layers(x, padding, resets, cache, tokens) if last is None else [x, last]
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.scores(hidden[-1][:, kept])
        kept = cache if (not self.training if use_cache is None else use_cache) else None
        output = CausalLMOutputWithPast(
            loss=mean_loss(logits, labels, shift_labels),
            logits=logits,
            past_key_values=kept,
            hidden_states=tuple(hidden) if wanted else None,
        )
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()

    def generation(self, x: Tensor, padding: Tensor | None, cache: Cache, tokens: Tensor, graph: bool) -> Tensor | None:
        """Returns the input of the output layer, (B,T,C), for a token of each sequence or for padded prompts; None otherwise."""
        if x.shape[1] == 1 and padding is None:
            return cache.step(self, x, graph)
        if padding is None or cache.length:
            return None
        last, cache.states = read_prompts(x, padding, self.read_group)
        cache.tokens, cache.length = tokens, x.shape[1]
        return last

    def through_layers(self, x: Tensor, padding, resets, cache: Cache, tokens: Tensor) -> list[Tensor]:
        """Returns the input of each layer and of the output, (B,T,C), and leaves the states after the last token in the cache."""
        states, hidden, before = {}, [x], cache.states
        for i, layer in enumerate(self.layers):
            y, states[i] = layer(hidden[-1].transpose(0, 1), before.get(i), padding, resets)
            hidden.append(y.transpose(0, 1))
        cache.states, cache.tokens, cache.length = states, tokens, cache.length + x.shape[1]
        hidden[-1] = hidden[-1] if self.layer_norm is None else self.layer_norm(hidden[-1])
        return hidden

    def read_group(self, x: Tensor, padding: Tensor | None) -> tuple[Tensor, dict[int, object]]:
        """Returns the input of the output layer, (B,T,C), and the states after the prompts of one length."""
        cache = Cache()
        return self.through_layers(x, padding, None, cache, x)[-1], cache.states

    def _prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs):
        """Padding at the end of a prompt keeps the position of its last token, so that the next one counts on from it."""
        positions, mask = (
            super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs),
            model_kwargs.get("attention_mask"),
        )
        if mask is None or mask.shape != positions.shape:
            return positions
        return (mask.long().cumsum(-1) - 1).clamp(min=0)

    def check(self, labels, shift_labels, logits_to_keep, input_ids, inputs_embeds, output_attentions, others) -> None:
        """Refuses arguments that contradict each other or that this model cannot obey."""
        if (labels is not None or shift_labels is not None) and (isinstance(logits_to_keep, Tensor) or logits_to_keep):
            raise Mistake(f"logits_to_keep is {logits_to_keep}; labels need the logits of all tokens, so leave it at 0")
        if labels is not None and shift_labels is not None:
            raise Mistake("labels and shift_labels are both given; give one of them")
        if (input_ids is None) == (inputs_embeds is None):
            raise Mistake("forward takes either input_ids or inputs_embeds")
        if self.config.output_attentions if output_attentions is None else output_attentions:
            raise Mistake("output_attentions asks for attention weights, which this model never computes; leave it out")
        unknown = [name for name, value in others.items() if name not in WITHOUT_EFFECT and value is not None]
        if unknown:
            raise Mistake(f"forward takes no {unknown[0]}; leave it out")

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
