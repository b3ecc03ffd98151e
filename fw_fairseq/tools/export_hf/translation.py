"""fast_weight_transformer as a model of transformers, which translates with fairseq's beam search."""

from __future__ import annotations

import torch

from ...config import linear_attentions, option_name
from ...errors import Mistake
from .language_models import decoder_options, decoder_tensors, difference, load, side_options, side_tensors

BEAM, LONGEST = 5, 200  # fairseq-generate's --beam and --max-len-b


def build(source):
    """Returns the model for transformers, with the weights of fairseq's encoder and decoder."""
    from ...huggingface import FastWeightForTranslation, FastWeightHFConfig, FastWeightTranslationConfig

    encoder, decoder = source.encoder, source.decoder
    config, linear = decoder.fast_weight_config, linear_attentions(decoder.fast_weight_config)
    check_parts(decoder.cfg, config)
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
    load(model, {f"{side}.{name}": x for side, named in tensors.items() for name, x in named.items()})
    return model


def check_parts(cfg, config) -> None:
    """Refuses decoders that read the source in another way than by one cross attention in each layer."""
    given = {name: getattr(config, name) for name in ("source_in_front",)} | {"decoder_attentions": config.decoder_attentions > 1}
    given |= {name: getattr(cfg, name) for name in ("no_cross_attention", "cross_self_attention")}
    for name, value in given.items():
        if value:
            raise Mistake(f"CHECKPOINT was trained with {option_name(name)}, which fw-export-hf does not have")


@torch.no_grad()
def compare(source, model, dictionaries) -> float:
    """Returns the difference from fairseq's model on random tokens."""
    limits = [model.config.encoder.max_position_embeddings, model.config.decoder.max_position_embeddings]
    draw = torch.Generator().manual_seed(0)
    tokens, target = (
        torch.randint(4, len(words), (2, min(16, limit or 16)), generator=draw) for words, limit in zip(dictionaries, limits)
    )
    lengths = torch.full((len(tokens),), tokens.shape[1])
    return difference(source, source(tokens, lengths, target), model(tokens, decoder_input_ids=target).logits)


def set_generation(model, dictionary) -> None:
    """Makes ``generate`` search as fairseq-generate does by default."""
    end, pad = dictionary.eos(), dictionary.pad()
    model.config.update({"bos_token_id": end, "eos_token_id": end, "pad_token_id": pad, "decoder_start_token_id": end})
    limit = model.config.decoder.max_position_embeddings
    words = min(LONGEST, limit - 1) if limit else LONGEST  # the end of sentence takes a position too
    options = dict(
        num_beams=BEAM,
        early_stopping=True,
        length_penalty=1.0,
        max_length=words + 2,  # with the end of sentence at either end
        min_new_tokens=1,
        suppress_tokens=[pad],
        decoder_start_token_id=end,
    )
    for name, value in options.items():
        setattr(model.generation_config, name, value)
