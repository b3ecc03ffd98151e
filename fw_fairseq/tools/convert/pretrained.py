"""Reads fairseq checkpoints and GPT-2 folders as fairseq's transformer_lm with today's names."""

from __future__ import annotations

import json
import re
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import omegaconf._utils
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.models.transformer_lm import TransformerLanguageModel, base_lm_architecture
from fairseq.tasks.language_modeling import LanguageModelingConfig
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from ...config import EXTRAS, SOFTMAX
from ...errors import Mistake
from ...files import building, pickled, reading, safetensors
from ...models.fast_weight_lm import FastWeightLanguageModel, FastWeightLanguageModelConfig
from ...patches.checkpoints.origin import SIDES, symbols_sum
from ...patches.checkpoints.reading import ORIGIN, load_only_data
from ...patches.literals import naming

SPECIAL = 4  # <s>, <pad>, </s>, <unk>: the first symbols of every fairseq dictionary
PADDING = 1
ACTIVATIONS = {"gelu_new": "gelu_accurate", "gelu_pytorch_tanh": "gelu_accurate", "gelu": "gelu", "relu": "relu"}
GPT2_OPTIONS = {
    "activation_function": tuple(ACTIVATIONS), "layer_norm_epsilon": (1e-5,), "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,), "tie_word_embeddings": (True,),
}  # fmt: skip
GPT2_NAMES = {"ln_1": "self_attn_layer_norm", "ln_2": "final_layer_norm", "attn.c_proj": "self_attn.out_proj",
              "mlp.c_fc": "fc1", "mlp.c_proj": "fc2"}  # fmt: skip


@dataclass
class Source:
    """A softmax Transformer: fast_weight_lm's options, tensors under fairseq's names, and the other groups of its cfg.

    ``symbols``: the dictionary after fairseq's four special symbols, where the source brings none of fairseq's own. ``origin``:
    what the checkpoint says of its task and dictionaries.
    """

    options: dict
    tensors: dict[str, Tensor]
    cfg: dict
    symbols: list[str] | None = None
    origin: dict | None = None


class Vocabulary:
    """The part of a dictionary that a model needs when it is built."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def pad(self) -> int:
        return PADDING


def read_pretrained(path: Path) -> Source:
    """Returns the model of a checkpoint or of a GPT-2's folder."""
    if not path.exists():
        known = "a fairseq checkpoint or a folder with a causal language model of transformers"
        raise Mistake(f"SOURCE {path} does not exist; it is {known}, and a model of the Hub must be downloaded first")
    with building(f"SOURCE {path} has options or parameters of which no model can be made"):
        source = read_gpt2(path) if path.is_dir() else read_fairseq(path)
        return match_layout(source, path)


def read_fairseq(path: Path) -> Source:
    """Returns the model of a checkpoint."""
    state = load_mapped(path)
    old = state.get("args")
    given = old if old is not None else state["cfg"]["model"]
    model: Any = vars(given) if isinstance(given, Namespace) else OmegaConf.to_container(given, resolve=False, enum_to_str=True)
    name = model.get("_name") or model.get("arch")
    if not issubclass(ARCH_MODEL_REGISTRY.get(name) or MODEL_REGISTRY.get(name, object), TransformerLanguageModel):
        raise Mistake(f"{path} holds a model of architecture {name!r}; fw-convert takes transformer_lm and its architectures")
    cfg: Any = OmegaConf.to_container(state["cfg"], resolve=True, enum_to_str=True)
    given = Namespace(**(model if old is not None else cfg["model"]))
    if old is not None:  # what they leave to their architecture; that of transformer_lm itself does nothing today
        (base_lm_architecture if name == "transformer_lm" else ARCH_CONFIG_REGISTRY[name])(given)
    options = lm_options(vars(given))
    if options["max_target_positions"] is None:
        options["max_target_positions"] = cfg["task"].get("max_target_positions") or options["tokens_per_sample"]
    for name, part in EXTRAS.items():  # which fairseq does not hand on to the layers of a language model
        options[name] = bool(options[name]) and any(f".{part}" in key for key in state["model"])
    return Source(options, state["model"], cfg, origin=(state.get("extra_state") or {}).get(ORIGIN))


def load_mapped(path: Path) -> dict:
    """Loads a checkpoint as fairseq does, but tensors stay on disk until they are used. Adam's moments, twice the model, are
    never."""
    return load_only_data(mapped, path)


def mapped(path: Path) -> dict:
    """Reads a checkpoint, whose tensors stay on disk."""
    state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    if state.get("cfg") is not None:
        state["cfg"] = options_of_any_kind(state["cfg"])
    return checkpoint_utils._upgrade_state_dict(state)


def options_of_any_kind(cfg: dict) -> DictConfig:
    """Returns fairseq's options, which may have a Namespace among them, as fairseq itself does."""
    if not omegaconf.__version__.startswith("2.0."):
        return OmegaConf.create(cfg, flags={"allow_objects": True})
    utils: Any = omegaconf._utils
    checked, utils.is_primitive_type = utils.is_primitive_type, lambda _: True  # 2.0 has no such flag
    try:
        return OmegaConf.create(cfg)
    finally:
        utils.is_primitive_type = checked


def lm_options(given: dict) -> dict:
    """Returns every option of fast_weight_lm: the given value, or its default, or the default of the task."""
    defaults = {f.name: f.default for f in fields(FastWeightLanguageModelConfig)}
    defaults |= {"add_bos_token": False, "tokens_per_sample": 1024, "max_target_positions": None, "tpu": False, "mixer": SOFTMAX}
    options = {name: given.get(name, value) for name, value in defaults.items() if not name.startswith("_")}
    for name, value in options.items():  # architectures write False where a number is asked for
        if isinstance(value, bool) and not isinstance(defaults[name], bool):
            options[name] = int(value)
    return options


def read_gpt2(folder: Path) -> Source:
    """Returns the model of a GPT-2's folder."""
    config = gpt2_config(folder)
    width, vocabulary, eos = config["n_embd"], config["vocab_size"], config["eos_token_id"]
    options = lm_options({
        "decoder_layers": config["n_layer"], "decoder_attention_heads": config["n_head"], "decoder_embed_dim": width,
        "decoder_input_dim": width, "decoder_output_dim": width, "decoder_ffn_embed_dim": config.get("n_inner") or 4 * width,
        "activation_fn": ACTIVATIONS[config["activation_function"]], "decoder_normalize_before": True, "decoder_learned_pos": True,
        "no_scale_embedding": True, "share_decoder_input_output_embed": True, "dropout": config.get("resid_pdrop", 0.1),
        "attention_dropout": config.get("attn_pdrop", 0.0), "tokens_per_sample": config["n_positions"],
        "max_target_positions": config["n_positions"],
    })  # fmt: skip
    tensors: dict[str, Tensor] = {"decoder.version": torch.tensor([3.0])}
    for name, tensor in gpt2_tensors(folder):
        tensors |= gpt2_to_fairseq(name, tensor, eos)
    tensors["decoder.output_projection.weight"] = tensors["decoder.embed_tokens.weight"]
    cfg = language_modeling_cfg(options["tokens_per_sample"], options["max_target_positions"])
    symbols = [str(i) for i in range(vocabulary) if i != eos]
    return Source(options, tensors, cfg, symbols, origin_of(symbols))


def language_modeling_cfg(tokens_per_sample: int, max_target_positions: int) -> dict:
    """The groups of options, but the model's, of a checkpoint of language_modeling."""
    cfg: Any = OmegaConf.to_container(OmegaConf.structured(FairseqConfig), resolve=False, enum_to_str=True)
    task = LanguageModelingConfig(data="", tokens_per_sample=tokens_per_sample, max_target_positions=max_target_positions)
    cfg["task"] = OmegaConf.to_container(OmegaConf.structured(task), resolve=False, enum_to_str=True)
    cfg["task"] |= {"_name": "language_modeling", "seed": 1, "batch_size": None, "batch_size_valid": None, "dataset_impl": None}
    cfg["task"] |= {"data_buffer_size": 10, "tpu": False, "use_plasma_view": False, "plasma_path": "/tmp/plasma"}
    return cfg


def origin_of(symbols: list[str]) -> dict:
    """What a checkpoint says of its task and dictionaries."""
    return {
        "task": "language_modeling",
        "dictionaries": dict.fromkeys(SIDES, symbols_sum([*Dictionary().symbols, *symbols])),
    }


def gpt2_config(folder: Path) -> dict:
    """Returns the configuration; refuses what would compute something else."""
    path = folder / "config.json"
    with reading(path, "a configuration"):
        config = {"n_positions": 1024, "activation_function": "gelu_new", "eos_token_id": 50256} | json.loads(path.read_text())
    if (kind := config.get("model_type")) != "gpt2":
        raise Mistake(f"SOURCE {folder} holds a model of type {kind}; fw-convert reads GPT-2 and fairseq's transformer_lm")
    for name, allowed in GPT2_OPTIONS.items():
        if config.get(name, allowed[0]) not in (*allowed, None):
            raise Mistake(f"{path} has {name} = {config[name]!r}; fw-convert takes: {', '.join(map(str, allowed))}")
    return config


def gpt2_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields one tensor at a time from the mapped files. Neither format runs code here."""
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    for file in files:
        with reading(file, "a model's weights"):
            yield from safetensors(file) if file.suffix == ".safetensors" else pickled(file)


def gpt2_to_fairseq(name: str, tensor: Tensor, eos: int) -> dict[str, Tensor]:
    """Renames a tensor. GPT-2 stores linear maps transposed; its token i is fairseq's symbol 'i', and its end of text is fairseq's
    </s>.

    The other special symbols copy the embedding of the end of text, which gives them almost no probability; zeros would give them
    the most.
    """
    name = name.removeprefix("transformer.")
    if name == "lm_head.weight" or name.endswith((".attn.bias", ".attn.masked_bias")):
        return {}  # the embeddings, and the causal mask
    if name == "wte.weight":
        return {"decoder.embed_tokens.weight": torch.cat([tensor[[eos] * SPECIAL], tensor[:eos], tensor[eos + 1 :]])}
    if name == "wpe.weight":
        return {"decoder.embed_positions.weight": torch.cat([tensor.new_zeros(PADDING + 1, tensor.shape[1]), tensor])}
    if name in ("ln_f.weight", "ln_f.bias"):
        return {f"decoder.layer_norm.{name[5:]}": tensor}
    layer, part, kind = parsed.groups() if (parsed := re.fullmatch(r"h\.(\d+)\.(.+)\.(\w+)", name)) else ("", name, "")
    prefix = f"decoder.layers.{layer}."
    tensor = tensor.t().contiguous() if tensor.dim() == 2 else tensor
    if part == "attn.c_attn":
        return {f"{prefix}self_attn.{which}_proj.{kind}": x for which, x in zip("qkv", tensor.chunk(3))}
    return {f"{prefix}{GPT2_NAMES.get(part, part)}.{kind}": tensor}


def skeleton(source: Source) -> Any:
    """Returns the model without its numbers; the embeddings give the size of its vocabulary, of which the output may have the first
    words only."""
    pattern = r"decoder\.embed_tokens\.(weight|embeddings\.\d+\.0\.weight)"
    words = sum(len(x) for name, x in source.tensors.items() if re.fullmatch(pattern, name))
    written, options = source.cfg["task"].get("output_dictionary_size", -1), source.options
    with torch.device("meta"), naming(options):
        written = words if written is None or written < 0 else min(words, written)
        task = Namespace(source_dictionary=Vocabulary(words), target_dictionary=Vocabulary(written))
        return FastWeightLanguageModel.build_model(OmegaConf.create(options), task)


def match_layout(source: Source, path: Path) -> Source:
    """Returns the source with today's names. Refuses one that lacks a tensor of the model, or has another tensor or shape."""
    options, tensors = source.options, source.tensors
    model = skeleton(source)
    model.upgrade_state_dict(tensors)
    options |= {"decoder_layers": len(model.decoder.layers), "decoder_layers_to_keep": None}  # those that were kept
    if model.decoder.layer_norm is None:  # checkpoints before version 3 had no norm after the last layer
        options["no_decoder_final_norm"] = True
        tensors["decoder.version"] = torch.tensor([3.0])
    expected = model.state_dict()
    for name in {*tensors, *expected}:  # of which only the dtype and device were ever used
        if name.endswith("._float_tensor"):
            (tensors.setdefault(name, torch.zeros(1)) if name in expected else tensors.pop(name))
    wrong = [f"lacks {name}" for name in expected if name not in tensors]
    wrong += [f"has {name}, which transformer_lm with its options does not have" for name in tensors if name not in expected]
    for name, want in expected.items():
        if name in tensors and tensors[name].shape != want.shape:
            wrong.append(f"has {name} of shape {tuple(tensors[name].shape)} instead of {tuple(want.shape)}")
    if wrong:
        raise Mistake(f"{path} is not laid out as fw-convert knows it: it {wrong[0]}")
    return source
