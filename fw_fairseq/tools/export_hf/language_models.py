"""fast_weight_lm as a model of transformers."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

import torch
from fairseq.modules import CharacterTokenEmbedder
from torch import Tensor, nn

from ...config import SOFTMAX, SPARSE_OPTIONS, FastWeightConfig, option_name
from ...errors import Mistake
from ...mixers import MIXERS
from ...models.fast_weight_decoder import FastWeightDecoder
from ...modules.plain_softmax import PlainAdaptiveSoftmax
from ...modules.positions import PositionsFromEnd

FORMS = ("norm_form", "norm_eps", "ffn_form")  # options of language models that no mixer reads


def build(decoder: FastWeightDecoder) -> Any:
    """Returns the model for transformers, with the weights of fairseq's decoder."""
    from ...huggingface import FastWeightForCausalLM, FastWeightHFConfig

    model = FastWeightForCausalLM(FastWeightHFConfig(**decoder_options(decoder))).eval()
    model.load_state_dict(decoder_tensors(decoder))
    return model


def decoder_options(decoder: FastWeightDecoder) -> dict:
    """Returns the options of fairseq's decoder as those of FastWeightHFConfig."""
    from ...huggingface import ACTIVATIONS

    cfg, config = decoder.cfg, decoder.fast_weight_config
    refused: dict[str, bool] = {option_name(name): bool(getattr(config, name)) for name in SPARSE_OPTIONS}
    refused["--plain-adaptive-softmax"] = isinstance(decoder.adaptive_softmax, PlainAdaptiveSoftmax)
    refused["--positions-from-end"] = isinstance(decoder.embed_positions, PositionsFromEnd)
    forms = {name: _jsonable(getattr(config, name)) for name in FORMS if hasattr(config, name)}
    refused[f"--activation-fn {cfg.activation_fn}"] = cfg.activation_fn not in ACTIVATIONS
    refuse_options(refused)
    _, output_bands = output_tensors(decoder, is_tied(decoder))
    size_out = decoder.project_out_dim.out_features if decoder.project_out_dim is not None else decoder.embed_dim
    return side_options(decoder, cfg.decoder, decoder.embed_dim, config) | dict(
        output_size=size_out,
        decoding_graph=not config.no_decoding_graph,
        mixers=[_mixer_name(layer.self_attn) for layer in decoder.layers],
        output_scale=size_out**-0.5 if config.scale_output else 1.0,
        max_position_embeddings=None if decoder.embed_positions is None and decoder.recurrent else cfg.max_target_positions,
        output_bands=output_bands if decoder.adaptive_softmax is not None else None,
        tie_word_embeddings=is_tied(decoder),
        **forms,
    )


def refuse_options(used: dict[str, bool]) -> None:
    """Refuses options of a checkpoint that models for transformers do not have. used: whether it was trained with each."""
    if refused := [name for name, value in used.items() if value]:
        raise Mistake(f"CHECKPOINT was trained with {refused[0]}, which fw-export-hf does not have")


def side_options(side: Any, cfg: Any, width: int, config: FastWeightConfig) -> dict:
    """Returns the options that an encoder and a decoder have in common. cfg: fairseq's options of this side; config: this
    project's options."""
    words = side.embed_tokens
    characters = isinstance(words, CharacterTokenEmbedder)
    refuse_options({"--character-embeddings": characters, "--quant-noise-pq": side.quant_noise is not None})
    return dict(
        vocab_size=len(side.dictionary),
        hidden_size=width,
        input_size=words.embedding_dim,
        intermediate_size=cfg.ffn_embed_dim,
        num_hidden_layers=len(side.layers),
        num_attention_heads=cfg.attention_heads,
        mixer_options={
            name: _jsonable(value) for name, value in asdict(config).items() if not name.startswith("_") and name not in FORMS
        },
        activation=str(side.cfg.activation_fn),
        normalize_before=cfg.normalize_before,
        final_norm=side.layer_norm is not None,
        embedding_norm=side.layernorm_embedding is not None,
        embedding_scale=side.embed_scale,
        positions="none" if side.embed_positions is None else ("learned" if cfg.learned_pos else "sinusoidal"),
        first_position=words.padding_idx + 1,
        input_bands=embedding_tensors(words).get("bands"),
    )


def decoder_tensors(decoder: FastWeightDecoder) -> dict[str, Tensor]:
    """Returns the weights of fairseq's decoder by the names that they have in transformers."""
    return side_tensors(decoder) | output_tensors(decoder, is_tied(decoder))[0]


def side_tensors(side: Any) -> dict[str, Tensor]:
    """Returns the weights of an encoder or of a decoder, without its output."""
    tensors = embedding_tensors(side.embed_tokens)
    tensors.pop("bands", None)
    for name, x in side.state_dict().items():
        name = name.replace(".self_attn.mixer.", ".self_attn.").replace("layernorm_embedding.", "embedding_norm.")
        name = name.replace(".channel_mixing.part.", ".channel_mixing.")
        name = re.sub(r"^project_(in|out)_dim\.", r"project_\1.", name)
        if name.startswith(("layers.", "layer_norm.", "embedding_norm.", "project_")) or name == "embed_positions.weight":
            tensors[name] = x
    return tensors


def _jsonable(value: Any) -> Any:
    return value if isinstance(value, (int, float)) else str(value)  # an option with choices is an Enum


def _mixer_name(attention: Any) -> str:
    mixer = getattr(attention, "mixer", None)
    return next((name for name, kind in MIXERS.items() if type(mixer) is kind), SOFTMAX)


def embedding_tensors(words: Any) -> dict:
    """Returns the weights of the input's embeddings by name, with their bands if they are adaptive."""
    if isinstance(words, nn.Embedding):
        return {"embed_tokens.weight": words.weight}
    tensors: dict = {"bands": [list(band[0].weight.shape) for band in words.embeddings]}
    for i, (table, linear) in enumerate(words.embeddings):
        tensors |= {f"embed_tokens.words.{i}.weight": table.weight, f"embed_tokens.maps.{i}.weight": linear.weight}
    return tensors


def is_tied(decoder: Any) -> bool:
    """Returns whether the output shares the input's embeddings."""
    if decoder.adaptive_softmax is None:
        return decoder.output_projection.weight is getattr(decoder.embed_tokens, "weight", None)
    head = decoder.adaptive_softmax.head
    return hasattr(head, "word_proj") and _weights(head.word_proj)[-1] is decoder.embed_tokens.embeddings[0][0].weight


def _weights(module: nn.Module) -> list[Tensor]:
    """Returns the weights of a linear map, or of a chain of them in the order of their use."""
    linear: list[Any] = [part for part in module.modules() if hasattr(part, "weight")]
    return [part.weight.t() if getattr(part, "transpose", False) else part.weight for part in linear]


def output_tensors(decoder: Any, tied: bool) -> tuple[dict[str, Tensor], list]:
    """Returns the weights of the output layer by name, and its bands."""
    softmax = decoder.adaptive_softmax
    if softmax is None:
        return ({} if tied else {"output.weight": decoder.output_projection.weight}), []
    first = softmax.cutoff[0]
    if hasattr(softmax.head, "word_proj"):
        clusters, bands = [_weights(softmax.head.word_proj)], softmax.head.class_proj.weight
    else:
        clusters, bands = [[softmax.head.weight[:first]]], softmax.head.weight[first:]
    clusters += [_weights(tail) for tail in softmax.tail]
    tensors = {"output.bands.weight": bands}
    for i, (*mapped, words) in enumerate(clusters):
        tensors |= {f"output.maps.{i}.weight": x for x in mapped}
        if not tied:
            tensors[f"output.words.{i}.weight"] = words
    return tensors, [list(words.shape) for *_, words in clusters]


@torch.no_grad()
def compare(source: Any, model: Any, words: int, order: Tensor | None = None) -> float:
    """Returns the difference from fairseq's model on random tokens. order: the dictionary's number of each of the model's
    tokens, where they are numbered otherwise."""
    length, draw = min(16, model.config.max_position_embeddings or 16), torch.Generator().manual_seed(0)
    tokens = torch.randint(4 if order is None else 0, words if order is None else len(order), (2, length), generator=draw)
    return difference(source, source(tokens if order is None else order[tokens]), model(tokens).logits, order)


def difference(source: Any, output: Any, logits: Tensor, order: Tensor | None = None) -> float:
    """Returns the largest difference between the log probabilities of fairseq's output and of these logits, relative to the
    largest log probability."""
    expected = source.get_normalized_probs(output, log_probs=True)
    expected = expected if order is None else expected[..., order].log_softmax(-1)
    return float((logits.float().log_softmax(-1) - expected).abs().max() / expected.abs().max())
