"""fast_weight_transformer as a model of transformers, which translates with fairseq's beam search."""

from __future__ import annotations

from typing import Any

import torch

from ...config import linear_attentions
from .language_models import decoder_options, decoder_tensors, difference, refuse_options, side_options, side_tensors

BEAM, LONGEST = 5, 200  # fairseq-generate's --beam and --max-len-b


def build(source: Any) -> Any:
    """Returns the model for transformers, with the weights of fairseq's encoder and decoder."""
    from ...huggingface import FastWeightForTranslation, FastWeightHFConfig, FastWeightTranslationConfig

    encoder, decoder = source.encoder, source.decoder
    config, linear = decoder.fast_weight_config, linear_attentions(decoder.fast_weight_config)
    cfg = decoder.cfg  # each layer must read the source by one cross attention
    used = {"--source-in-front": config.source_in_front, "--decoder-attentions": config.decoder_attentions > 1}
    refuse_options({**used, "--no-cross-attention": cfg.no_cross_attention, "--cross-self-attention": cfg.cross_self_attention})
    shared = encoder.embed_tokens is decoder.embed_tokens
    first = side_options(encoder, encoder.cfg.encoder, encoder.cfg.encoder.embed_dim, config) | dict(
        mixers=["linear" if "encoder" in linear else "softmax"] * len(encoder.layers),
        max_position_embeddings=encoder.cfg.max_source_positions if encoder.embed_positions is not None else None,
    )
    model = FastWeightForTranslation(
        FastWeightTranslationConfig(
            encoder=FastWeightHFConfig(**first),
            decoder=FastWeightHFConfig(**decoder_options(decoder)),
            linear_cross="cross" in linear,
            tie_word_embeddings=shared,
        )
    ).eval()
    tensors = {"encoder": side_tensors(encoder), "decoder": decoder_tensors(decoder)}
    model.load_state_dict({f"{side}.{name}": x for side, named in tensors.items() for name, x in named.items()})
    return model


@torch.no_grad()
def compare(source: Any, model: Any, dictionaries: list) -> float:
    """Returns the difference from fairseq's model on random tokens."""
    limits = [model.config.encoder.max_position_embeddings, model.config.decoder.max_position_embeddings]
    draw = torch.Generator().manual_seed(0)
    tokens, target = (
        torch.randint(4, len(words), (2, min(16, limit or 16)), generator=draw) for words, limit in zip(dictionaries, limits)
    )
    lengths = torch.full((len(tokens),), tokens.shape[1])
    return difference(source, source(tokens, lengths, target), model(tokens, decoder_input_ids=target).logits)


def set_generation(model: Any, dictionary: Any) -> None:
    """Makes ``generate`` search as fairseq-generate does by default."""
    end, pad = dictionary.eos(), dictionary.pad()
    model.config.update({"bos_token_id": end, "eos_token_id": end, "pad_token_id": pad, "decoder_start_token_id": end})
    limit = model.config.decoder.max_position_embeddings
    words = min(LONGEST, limit - 1) if limit else LONGEST  # the end of sentence takes a position too
    options = dict(
        num_beams=BEAM, early_stopping=True, length_penalty=1.0, max_length=words + 2,  # with the end of sentence at either end
        min_new_tokens=1, suppress_tokens=[pad], decoder_start_token_id=end,
    )  # fmt: skip
    for name, value in options.items():
        setattr(model.generation_config, name, value)
