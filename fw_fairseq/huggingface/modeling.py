"""fast_weight_lm as transformers loads it.

Its cache is the mixers' state, so ``generate`` takes the same time and memory for every token, and reads a prompt in one
pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from ..errors import Mistake
from .configuration import FastWeightHFConfig
from .layers import Cache, Layer
from .parts import CACHE, Decodes, Drawn, KeepsState, cache_of, caches, mean_loss, padding_of, refuse_unknown
from .prompts import carried
from .prompts import read as read_prompts


class FastWeightForCausalLM(KeepsState, Drawn, Decodes, PreTrainedModel, GenerationMixin):
    """The language model as transformers loads it."""

    config_class = FastWeightHFConfig
    base_model_prefix = "model"
    _no_split_modules = ["Layer"]  # noqa: RUF012
    supports_gradient_checkpointing = True
    _is_stateful = False  # its cache can take tokens back
    accepts_loss_kwargs = False  # the loss is a mean, so Trainer divides it by the number of accumulated steps

    def __init__(self, config: FastWeightHFConfig) -> None:
        super().__init__(config)
        self.make_embeddings(config)
        self.make_layers(config, Layer)
        self.draw_as_fairseq()
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module | None:
        return self.output  # None: the input's embeddings serve

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.output = value

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args, **kwargs) -> Any:
        """Resizes the vocabulary; an adaptive vocabulary keeps its size."""
        if new_num_tokens is not None and (self.config.input_bands or self.config.output_bands):
            raise Mistake(f"new_num_tokens is {new_num_tokens}; an adaptive vocabulary keeps its size, {self.config.vocab_size}")
        return super().resize_token_embeddings(new_num_tokens, *args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        decoding_graph: bool | None = None,
        **others,
    ) -> CausalLMOutputWithPast | tuple:
        """Returns the logits of the next token; with an adaptive vocabulary they are log probabilities.

        attention_mask: 0 at padding, on either side. position_ids: a token at position 0 begins a new text, which does not see the
        one before it. past_key_values, or cache by name: the cache to continue from; its tokens must not be given again.
        inputs_embeds: what the input embeddings return, in place of input_ids. labels: the ids, -100 where there is none; none
        counts for a position that is padding. shift_labels, by name: the id that each position is to predict, in place of labels.
        decoding_graph: whether a GPU generates with CUDA graphs; ``generate`` takes it, too.
        """
        shift_labels = others.pop("shift_labels", None)  # by that name Trainer would expect it of every text
        inputs, use_cache = self.embeddings_of(input_ids, inputs_embeds), caches(self, use_cache)
        cache = cache_of(past_key_values, others, inputs, use_cache)
        refuse_unknown(others)
        padding = padding_of(attention_mask, inputs, earlier=cache.length > 0)
        x, tokens, resets = self.embed(inputs, padding, position_ids, cache.tokens)
        cache.note(self, x, padding is None and resets is None)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        graph = getattr(self.config, "decoding_graph", True) if decoding_graph is None else decoding_graph
        generates = not (torch.is_grad_enabled() or self.training or wanted) and resets is None
        last = self.generation(x, padding, cache, tokens, graph) if generates else None
        hidden = self.through_layers(x, padding, resets, cache, tokens) if last is None else [x, last]
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        final = hidden[-1] if padding is None or last is not None else carried(hidden[-1], ~padding)
        logits = self.scores(final[:, kept])
        loss, hidden_states = mean_loss(logits, labels, shift_labels, padding), tuple(hidden) if wanted else None
        returned: dict[str, Any] = {CACHE: cache if use_cache else None}
        return CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=hidden_states, **returned)

    def generation(self, x: Tensor, padding: Tensor | None, cache: Cache, tokens: Tensor, graph: bool) -> Tensor | None:
        """Returns the input of the output layer, (B,T,C), for a token of each sequence or for padded prompts; None otherwise."""
        if x.shape[1] == 1 and padding is None:
            return cache.step(self, x, graph)
        if padding is None or cache.length:
            return None
        last, cache.states = read_prompts(x, padding, self.read_group)
        cache.tokens, cache.length = tokens, x.shape[1]
        return last

    def read_group(self, x: Tensor, padding: Tensor | None) -> tuple[Tensor, dict[int, object]]:
        """Returns the input of the output layer, (B,T,C), and the states after the prompts of one length."""
        cache = Cache()
        return self.through_layers(x, padding, None, cache, x)[-1], cache.states

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict) -> Tensor:
        """Padding at the end of a prompt keeps the position of its last token, so that the next one counts on from it."""
        positions, mask = (
            super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs),
            model_kwargs.get("attention_mask"),
        )
        if mask is None or mask.shape != positions.shape:
            return positions
        return (mask.long().cumsum(-1) - 1).clamp(min=0)
