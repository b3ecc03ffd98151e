"""fw-convert of a folder with a recurrent model of flash-linear-attention, or with Mamba 2 of transformers: all weights stay."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fairseq.models import ARCH_CONFIG_REGISTRY
from torch import Tensor

from ...errors import Mistake
from ...files import building, reading
from ...mixers import FastWeight
from .fla_layers import of_mixer
from .pretrained import Source, gpt2_tensors, language_modeling_cfg, lm_options, match_layout, origin_of, skeleton
from .recurrent_options import KINDS, options_of

LENGTH = 1024  # tokens of a training sample, as the checkpoint has it; the models take texts of any length
NO_BOUND = 1e-35  # of HGRN 2's first layer, whose logit is to be finite
MODEL = {"norm_f": "layer_norm", "norm": "layer_norm"}
LAYER = {
    "attn_norm": "self_attn_layer_norm", "norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm",
    "ffn_norm": "final_layer_norm", "mlp.down_proj": "fc2", "ffn.key": "channel_mixing.part.key",
    "ffn.key.linear": "channel_mixing.part.key", "ffn.value": "channel_mixing.part.value",
    "ffn.receptance.linear": "channel_mixing.part.receptance",
}  # fmt: skip
MIXTURES = {"ffn.x_k": "mixture", "ffn.key.mu": "mixture", "ffn.receptance.mu": "receptance_mixture"}
Tensors = dict[str, Tensor]


def is_recurrent(source: Path) -> bool:
    """Whether a folder has a model of one of the kinds here. Refuses one of transformers where only some layers recur."""
    config = configuration(source) if (source / "config.json").exists() else {}
    known = config.get("model_type") in KINDS
    if not known and "linear_attention" in ((config.get("text_config") or config).get("layer_types") or ()):
        raise Mistake(
            f"SOURCE {source} has recurrent layers beside softmax with gates or positions that no mixer has; run it in"
            " transformers, with fw_fairseq.accelerate()"
        )
    return known


def configuration(folder: Path) -> dict[str, Any]:
    """The options of a model, as its folder has them."""
    path = folder / "config.json"
    with reading(path, "a configuration"):
        return json.loads(path.read_text())


def convert_recurrent(folder: Path) -> tuple[str, Source, list[tuple]]:
    """The architecture, the model, and for each of its tensors the name, what became of it, its size and how."""
    from ...pretrained.folders import symbols_of, tokens_of

    path, config = folder / "config.json", configuration(folder)
    with building(f"SOURCE {folder} has options or parameters of which no model can be made"):
        tensors = {re.sub(r"^(model|backbone)\.", "", name): x for name, x in gpt2_tensors(folder)}
        architecture, given = options_of(config, path)
        embeddings = next((tensors.pop(name) for name in ("embeddings.weight", "embedding.weight") if name in tensors), None)
        if embeddings is None:
            raise Mistake(f"{path} is beside weights without embeddings.weight; fw-convert needs those of the whole model")
        tokens = Namespace(vocab_size=len(embeddings), **{name: config.get(name) for name in ("bos_token_id", "eos_token_id")})
        symbols = symbols_of(tokens)
        rows, _ = tokens_of(["<s>", "<pad>", "</s>", "<unk>", *symbols], tokens, str(folder))
        made = {"decoder.version": torch.tensor([3.0]), "decoder.embed_tokens.weight": embeddings[rows]}
        output = tensors.pop("lm_head.weight", None)
        tied = given["share_decoder_input_output_embed"] or output is None
        made["decoder.output_projection.weight"] = made["decoder.embed_tokens.weight"] if tied or output is None else output[rows]
        args = Namespace(**given, decoder_ffn_embed_dim=units(tensors))
        ARCH_CONFIG_REGISTRY[architecture](args)
        options = lm_options({**vars(args), "tokens_per_sample": LENGTH, "max_target_positions": LENGTH, "dropout": 0.0})
        source = Source(options, made, language_modeling_cfg(LENGTH, LENGTH), symbols, origin_of(symbols))
        source.tensors |= dict(renamed(tensors, skeleton(source).decoder.layers, folder))
        match_layout(source, folder)
    lines = [(name, "copied", x.numel(), "") for name, x in source.tensors.items() if name != "decoder.version"]
    return architecture, source, [line for line in lines if not (tied and line[0] == "decoder.output_projection.weight")]


def units(tensors: Tensors) -> int:
    """The width of the feed-forward layers."""
    names = ("mlp.gate_proj.weight", "ffn.key.weight", "ffn.key.linear.weight")
    return next((len(tensors[f"layers.0.{name}"]) for name in names if f"layers.0.{name}" in tensors), 0)


def renamed(tensors: Tensors, layers: Any, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of layers and norms by fairseq's names; one that is not known by its own."""
    bounds = bounds_of(tensors.pop("lower_bounds", None), len(layers))
    mixers: list[Tensors] = [{} for _ in layers]
    gates: Tensors = {}
    for name, x in tensors.items():
        number, whole = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+)", name).groups()  # type: ignore[union-attr]
        part, _, kind = whole.rpartition(".")
        if number is None:
            yield f"decoder.{MODEL.get(part, part)}.{kind}", x
            continue
        prefix = f"decoder.layers.{number}."
        if whole.startswith(("attn.", "mixer.")) and int(number) < len(layers):
            mixers[int(number)][whole.partition(".")[2]] = x
        elif whole in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
            gates[whole + number] = x
            pair = [gates.get(f"mlp.{half}_proj.weight{number}") for half in ("gate", "up")]
            if None not in pair:
                yield f"{prefix}fc1.weight", torch.cat(pair)  # type: ignore[arg-type]
        elif part == "pre_norm":
            yield f"decoder.layernorm_embedding.{kind}", x
        elif whole in MIXTURES:
            yield f"{prefix}channel_mixing.part.{MIXTURES[whole]}", x
        else:
            yield f"{prefix}{LAYER.get(part, part)}.{kind}", x
    for number, (layer, weights) in enumerate(zip(layers, mixers)):
        bound = {} if bounds is None else {"lower_bound": bounds[number]}
        made = of_whole_mixer(layer.self_attn.mixer, weights, bound, f"{folder} has in layer {number} other weights than")
        yield from ((f"decoder.layers.{number}.self_attn.mixer.{name}", x) for name, x in made.items())


def of_whole_mixer(mixer: FastWeight, weights: Tensors, bound: Tensors, otherwise: str) -> Tensors:
    """The parameters of ``mixer``. Refuses weights among which one is missing or that are not all used."""
    try:
        made = of_mixer(mixer, weights | bound)
    except (StopIteration, KeyError, RuntimeError) as error:
        raise Mistake(f"{otherwise} fw-convert knows") from error
    if sum(x.numel() for x in made.values()) != sum(x.numel() for x in (weights | bound).values()):
        raise Mistake(f"{otherwise} fw-convert knows")
    dtype = next(iter(weights.values())).dtype
    return {name: x.to(dtype) if name == "makers.f.bias" else x for name, x in made.items()}


def bounds_of(table: Tensor | None, layers: int) -> Tensor | None:
    """HGRN 2's bounds of its gates by layer, (L,C), from what its model has of all of them."""
    if table is None:
        return None
    shares = table.double().softmax(0)
    return (shares.cumsum(0) - shares[0]).clamp(min=NO_BOUND)
