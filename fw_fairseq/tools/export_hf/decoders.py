"""pretrained_lm as a model of transformers: the decoder as it was where all of its layers are softmax, else with its heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import Mistake
from ...files import building
from ...pretrained.low_rank import merged


def build(decoder: Any) -> Any:
    """Returns the model for transformers, with the weights of fairseq's decoder, adapters merged into them."""
    from ...pretrained.exported import ConvertedConfig, ConvertedForCausalLM
    from ...pretrained.folders import empty_model

    if decoder.heads:
        model = ConvertedForCausalLM(ConvertedConfig(text_config=json.loads(decoder.configuration), **decoder.arguments))
    else:
        model = empty_model(decoder.configuration)
    (model.model if decoder.heads else model).load_state_dict(merged(decoder.model.state_dict()))
    return model.eval()


def order_of(decoder: Any) -> Tensor:
    """Returns the dictionary's number of each of the model's tokens."""
    symbols = decoder.known.nonzero().flatten()
    return torch.empty_like(symbols).scatter_(0, decoder.tokens[symbols], symbols)


def tokenizer_of(folder: str | Path | None, model: Any) -> Any:
    """Returns the tokenizer of the pretrained model."""
    if folder is None:
        raise Mistake("--tokenizer is missing; it is the folder of the pretrained model, with its tokenizer")
    from transformers import AutoTokenizer

    with building(f"--tokenizer {folder} has no tokenizer of transformers"):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    if len(tokenizer) > model.config.vocab_size:
        said = f"--tokenizer {folder} has {len(tokenizer)} tokens, and the model {model.config.vocab_size}"
        raise Mistake(f"{said}; name the folder of the pretrained model")
    return tokenizer
