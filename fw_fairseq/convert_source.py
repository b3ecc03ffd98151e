"""What fw-convert reads: fairseq's transformer_lm checkpoints of any age, and folders with a Hugging Face GPT-2."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from fairseq import checkpoint_utils, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from torch import Tensor

SPECIAL = 4  # fairseq's <s>, <pad>, </s>, <unk> come first in a dictionary
END = "<|endoftext|>"
GPT2_TENSORS = {
    "wte.weight": "embed_tokens.weight",
    "ln_f": "layer_norm",
    "ln_1": "self_attn_layer_norm",
    "attn.c_proj": "self_attn.out_proj",
    "ln_2": "final_layer_norm",
    "mlp.c_fc": "fc1",
    "mlp.c_proj": "fc2",
}
GPT2_ACTIVATIONS = {"gelu_new": "gelu_accurate", "gelu_pytorch_tanh": "gelu_accurate", "gelu": "gelu", "relu": "relu"}


@dataclass
class Source:
    parameters: dict[str, Tensor]  # by fairseq's names
    options: dict  # of the model, by fairseq's names
    cfg: object  # of the whole run, an omegaconf.DictConfig
    words: int
    dictionary: str = ""  # dict.txt where the source has none of fairseq's


def read_source(path: Path) -> Source:
    if path.is_dir():
        return read_gpt2(path)
    if not path.exists():
        raise FileNotFoundError(f"SOURCE: {path} does not exist; it must be a checkpoint or a folder with a GPT-2")
    return read_fairseq(path)


def read_fairseq(path: Path) -> Source:
    state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    cfg, parameters = state["cfg"], state["model"]
    if cfg is None or not str(cfg.model.get("_name", "")).startswith("transformer_lm"):
        kind = "without options" if cfg is None else f"of a {cfg.model.get('_name')}"
        raise ValueError(f"SOURCE: {path} is a checkpoint {kind}; it must be of a transformer_lm")
    for name in [name for name in parameters if ".self_attn.in_proj_" in name]:  # as fairseq wrote them until 2019
        kind = name.rpartition("_")[2]
        for part, x in zip(("q_proj", "k_proj", "v_proj"), parameters.pop(name).chunk(3)):
            parameters[name.replace(f"in_proj_{kind}", f"{part}.{kind}")] = x.clone()
    return Source(parameters, dict(cfg.model), cfg, count_words(parameters))


def count_words(parameters: dict[str, Tensor]) -> int:
    """Rows of the embedding, in all of its bands where it is adaptive."""
    bands = [name for name in parameters if re.fullmatch(r"decoder\.embed_tokens\.(weight|embeddings\.\d+\.0\.weight)", name)]
    if not bands:
        raise ValueError(
            "SOURCE: decoder.embed_tokens.weight is missing; it must be a transformer_lm with a table of word embeddings"
        )
    return sum(len(parameters[name]) for name in bands)


def read_gpt2(folder: Path) -> Source:
    """The layout of ``GPT2LMHeadModel.save_pretrained``. A word of fairseq's dictionary is the number of GPT-2's token.

    fairseq's own four symbols get the embedding of <|endoftext|>, which </s> stands for.
    """
    config = json.loads(required(folder, "config.json").read_text())
    if config.get("model_type") != "gpt2":
        raise ValueError(f"SOURCE: {folder}/config.json is of model_type {config.get('model_type')!r}; it must be 'gpt2'")
    activation = config.get("activation_function", "gelu_new")
    if activation not in GPT2_ACTIVATIONS:
        raise ValueError(f"SOURCE: activation_function is {activation!r}; allowed: {', '.join(GPT2_ACTIVATIONS)}")
    if not config.get("tie_word_embeddings", True) or config.get("scale_attn_by_inverse_layer_idx"):
        raise ValueError(f"SOURCE: {folder}/config.json has untied embeddings or attention scaled by layer; neither is converted")
    tensors = {name.removeprefix("transformer."): x for name, x in read_tensors(folder).items()}
    end = config.get("eos_token_id", config["vocab_size"] - 1)
    parameters = {"decoder.version": torch.tensor([3.0])}
    for name in list(tensors):
        place_gpt2_tensor(parameters, name, tensors.pop(name), end)
    shape = {
        "decoder_layers": config["n_layer"], "decoder_embed_dim": config["n_embd"], "decoder_attention_heads": config["n_head"],
        "decoder_input_dim": config["n_embd"], "decoder_output_dim": config["n_embd"],
        "decoder_ffn_embed_dim": config.get("n_inner") or 4 * config["n_embd"],
        "activation_fn": GPT2_ACTIVATIONS[activation], "decoder_normalize_before": True, "decoder_learned_pos": True,
        "share_decoder_input_output_embed": True, "no_scale_embedding": True, "max_target_positions": config["n_positions"],
        "tokens_per_sample": config["n_positions"], "dropout": config.get("resid_pdrop", 0.1),
        "attention_dropout": config.get("attn_pdrop", 0.1),
    }  # fmt: skip
    parser = options.get_training_parser()
    namespace = options.parse_args_and_arch(parser, ["unused", "--task", "language_modeling", "--arch", "fast_weight_lm"])
    vars(namespace).update(shape)
    words = [f"{token} 1" for token in range(config["vocab_size"])]
    dictionary = "\n".join(words) + "\n"
    return Source(parameters, shape, convert_namespace_to_omegaconf(namespace), SPECIAL + len(words), dictionary)


def place_gpt2_tensor(parameters: dict[str, Tensor], name: str, x: Tensor, end: int) -> None:
    """One tensor of GPT-2 under fairseq's name; its linear layers are stored transposed."""
    if re.fullmatch(r"h\.\d+\.attn\.(bias|masked_bias)", name) or name == "lm_head.weight":
        return  # masks; the embedding once more
    if name == "wte.weight":
        parameters["decoder.embed_tokens.weight"] = parameters["decoder.output_projection.weight"] = torch.cat(
            [x[end].expand(SPECIAL, -1), x]
        )
        return
    if name == "wpe.weight":  # fairseq counts positions from its padding index + 1 = 2
        parameters["decoder.embed_positions.weight"] = torch.cat([torch.zeros_like(x[:2]), x])
        return
    match = re.fullmatch(r"(?:h\.(\d+)\.)?(\w+(?:\.c_\w+)?)\.(weight|bias)", name)
    layer, module, kind = match.groups() if match else (None, None, None)
    prefix = "decoder." if layer is None else f"decoder.layers.{layer}."
    if kind == "weight" and module and ".c_" in module:
        x = x.mT.contiguous()
    if module == "attn.c_attn":
        for part, piece in zip(("q_proj", "k_proj", "v_proj"), x.chunk(3)):
            parameters[f"{prefix}self_attn.{part}.{kind}"] = piece.clone()
    elif module in GPT2_TENSORS:
        parameters[f"{prefix}{GPT2_TENSORS[module]}.{kind}"] = x
    else:
        raise ValueError(f"SOURCE: {name} is not part of a GPT-2")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    readers: dict[str, Callable] = {
        "model.safetensors": read_safetensors,
        "pytorch_model.bin": lambda path: torch.load(path, map_location="cpu", weights_only=True),
    }
    for name, read in readers.items():
        if (folder / name).exists():
            try:
                return read(folder / name)
            except Exception as error:
                reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
                raise ValueError(f"SOURCE: {folder / name} cannot be read ({reason[0]})") from error
    raise FileNotFoundError(f"SOURCE: {folder} has none of: {', '.join(readers)}")


def read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise ValueError("install safetensors, or the extra: pip install 'fw_fairseq[gpt2]'") from None
    return load_file(path)


def required(folder: Path, name: str) -> Path:
    if not (folder / name).exists():
        raise FileNotFoundError(f"SOURCE: {folder} has no {name}; it must be a folder with a Hugging Face GPT-2")
    return folder / name
