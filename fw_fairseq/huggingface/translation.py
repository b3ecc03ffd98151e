"""fast_weight_transformer as transformers loads it: an encoder-decoder model with ``generate``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.utils import can_return_tuple

from ..errors import Mistake
from .configuration import FastWeightTranslationConfig
from .layers import Cache
from .parts import CACHE, Drawn, KeepsState, cache_of, caches, mean_loss, padding_of, refuse_unknown
from .sides import Decoder, Encoder


class EndAtLast(LogitsProcessor):
    """Leaves the end of sentence alone as the last word, with its own probability, as fairseq's search does. Where an option of
    ``generate`` rules the end out, the last word is any other.
    """

    def __init__(self, last: int, end: Tensor) -> None:
        self.last, self.end = last, end

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns the scores of the words that may follow."""
        if input_ids.shape[1] < self.last:
            return scores
        end = self.end.to(scores.device)
        alone = torch.full_like(scores, -torch.inf).index_copy(1, end, scores[:, end])
        return torch.where(alone.isneginf().all(1, keepdim=True), scores, alone)


class FastWeightForTranslation(KeepsState, Drawn, PreTrainedModel, GenerationMixin):
    """The translation model as transformers loads it."""

    config_class = FastWeightTranslationConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _no_split_modules = ["EncoderLayer", "DecoderLayer"]  # noqa: RUF012
    _tied_weights_keys = {"encoder.embed_tokens.weight": "decoder.embed_tokens.weight"}  # noqa: RUF012
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False  # the loss is a mean, so Trainer divides it by the number of accumulated steps

    def __init__(self, config: FastWeightTranslationConfig) -> None:
        super().__init__(config)
        self.encoder = Encoder(config.encoder)
        self.decoder = Decoder(config.decoder, config.linear_cross, config.encoder.hidden_size)
        self.draw_as_fairseq()
        self.post_init()

    def get_encoder(self, *unused, **others) -> nn.Module:
        return self.encoder

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the embeddings of the source, and those of the target where they are the same."""
        self.encoder.embed_tokens = value
        if self.config.tie_word_embeddings:
            self.decoder.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module | None:
        return self.decoder.output

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args, **kwargs) -> Any:
        """Returns the embeddings of the source; the vocabularies of two languages keep their sizes."""
        if new_num_tokens not in (None, self.config.encoder.vocab_size):
            size = self.config.encoder.vocab_size
            raise Mistake(f"new_num_tokens is {new_num_tokens}; a translation model keeps its vocabularies, {size} words here")
        return self.get_input_embeddings()

    def _get_logits_processor(self, generation_config: Any, *args, **kwargs) -> LogitsProcessorList:
        processors = super()._get_logits_processor(generation_config, *args, **kwargs)  # type: ignore[misc]
        if generation_config.eos_token_id is not None and generation_config.forced_eos_token_id is None:
            end = torch.as_tensor(generation_config.eos_token_id).view(-1)
            processors.append(EndAtLast(generation_config.max_length - 1, end))
        return processors

    def _prepare_generated_length(self, generation_config: Any, has_default_max_length: bool, *args, **kwargs) -> Any:
        """The folder's longest length is what it says, which transformers 5.0 to 5.2 take for a default of theirs and raise."""
        has_default_max_length = has_default_max_length and self.generation_config.max_length is None
        return super()._prepare_generated_length(generation_config, has_default_max_length, *args, **kwargs)  # type: ignore[misc]

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Returns the labels after the end of sentence that each translation begins with."""
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        return F.pad(labels[:, :-1].masked_fill(labels[:, :-1].eq(-100), pad), (1, 0), value=start)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **others,
    ) -> Seq2SeqLMOutput | tuple:
        """Returns the logits of the next word of each translation; with an adaptive vocabulary they are log probabilities.

        attention_mask and decoder_attention_mask: 0 at padding, on either side. decoder_input_ids: the end of sentence and the
        translation so far; by default the labels, one place later. encoder_outputs: what the encoder returned, in place of a
        source. past_key_values, or cache by name: the cache to continue from, which has read the source; its tokens must not be
        given again. labels: the words of the translations and their ends, -100 where there is none.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None and labels is not None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds, wanted)
        source = encoder_outputs[0]
        inputs = self.decoder.embeddings_of(decoder_input_ids, decoder_inputs_embeds, "decoder_input_ids")
        use_cache = caches(self, use_cache)
        cache = cache_of(past_key_values, others, inputs, use_cache)
        refuse_unknown(others)
        padding = padding_of(decoder_attention_mask, inputs, "decoder_attention_mask", earlier=cache.length > 0)
        looked_at = source.transpose(0, 1), padding_of(attention_mask, source)
        x, tokens, _ = self.decoder.embed(inputs, padding, None, cache.tokens)
        hidden = self.decoder.through_layers(x, padding, None, cache, tokens, *looked_at)
        logits = self.decoder.scores(hidden[-1])
        returned: dict[str, Any] = {CACHE: cache if use_cache else None}
        return Seq2SeqLMOutput(
            loss=mean_loss(logits, None, labels),
            logits=logits,
            decoder_hidden_states=tuple(hidden) if wanted else None,
            encoder_last_hidden_state=source,
            encoder_hidden_states=getattr(encoder_outputs, "hidden_states", None),
            **returned,
        )
