"""fw-export-hf builds the model, compares it with fairseq's, and writes the folder."""

from __future__ import annotations

import functools
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from ...errors import Mistake
from ...patches.non_finite import NotFinite, why_not_finite
from ..checkpoints import first_symbol, load_model
from . import decoders, language_models, onnx, translation
from .folders import TARGET, TOLERANCE, check_alone, check_output, load, replace, write
from .tokenizers import renumber, word_tokenizer

PROG = "fw-export-hf"
ARCHITECTURES = ("fast_weight_lm", "fast_weight_transformer", "pretrained_lm")


def export(
    checkpoint: str | Path,
    output: str | Path,
    data: str | Path | None = None,
    tokenizer: str | Path | None = None,
    force: bool = False,
    onnx_file: bool = False,
) -> Any:
    """Writes the folder ``output`` and returns the model in it.

    data: the folder with dict.txt, or with those of both languages; by default that of the training. tokenizer: a folder with a
    GPT-2 tokenizer, if the symbols of the dictionary are its numbers, as fw-convert writes them. Without it, the words of the
    dictionary become a tokenizer; a pretrained_lm needs that of its model. onnx_file: whether the folder also has the model as a
    file of ONNX.
    """
    output = Path(output).resolve()
    check_output(output, force)
    source, task = load_model(checkpoint, data, PROG, ARCHITECTURES)
    if tokenizer is not None and (hasattr(source, "encoder") or first_symbol(task) != task.source_dictionary.eos()):
        raise Mistake("--tokenizer is for a CHECKPOINT that fw-convert made of a GPT-2, whose texts have no <s>; leave it out")
    if hasattr(source.decoder, "configuration"):
        if onnx_file:
            raise Mistake("--onnx is for a CHECKPOINT of fast_weight_lm; leave it out")
        model, compare, tokenizers = _decoder(source, tokenizer)
    elif hasattr(source, "encoder"):
        model, compare, tokenizers = _translation_model(source, task)
    else:
        model, compare, tokenizers = _language_model(source, task, tokenizer)
    if onnx_file:
        onnx.refuse(model)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        _check(compare(model), source, checkpoint)
        write(model, tokenizers, temporary)
        _check(compare(load(type(model), temporary)), source, checkpoint)
        check_alone(temporary, f"CHECKPOINT {checkpoint}")
        if onnx_file:
            onnx.write(model, temporary / onnx.FILE)
        check_output(output, force)
        replace(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return model


def _check(difference: float, source: nn.Module, checkpoint: str | Path) -> None:
    """Refuses a model that computes something else than fairseq's."""
    if math.isnan(difference):
        raise NotFinite(f"CHECKPOINT {checkpoint} computes NaN; {why_not_finite(source)}, and nothing was written")
    if not difference <= TOLERANCE:
        raise Mistake(f"CHECKPOINT {checkpoint} computes other logits in transformers, by {difference:.1e}; nothing was written")


def _language_model(source: Any, task: Any, tokenizer: str | Path | None) -> tuple[Any, Callable, dict]:
    """The model of a fast_weight_lm, a function that compares a model with fairseq's, and its tokenizer."""
    dictionary, first = task.source_dictionary, first_symbol(task)
    language_models.refuse_options({"--output-dictionary-size": len(task.target_dictionary) != len(dictionary)})
    model, order = language_models.build(source.decoder), None
    model.config.update({"bos_token_id": first, "eos_token_id": dictionary.eos(), "pad_token_id": dictionary.pad()})
    if tokenizer is not None:
        order = renumber(model, dictionary, Path(tokenizer))
    compare = functools.partial(language_models.compare, source, words=len(dictionary), order=order)
    return model, compare, {"": word_tokenizer(dictionary, first=first) if tokenizer is None else Path(tokenizer)}


def _decoder(source: Any, tokenizer: str | Path | None) -> tuple[Any, Callable, dict]:
    """As ``_language_model``, of a pretrained_lm."""
    model, order = decoders.build(source.decoder), decoders.order_of(source.decoder)
    compare = functools.partial(language_models.compare, source, words=len(order), order=order)
    return model, compare, {"": decoders.tokenizer_of(tokenizer, model)}


def _translation_model(source: Any, task: Any) -> tuple[Any, Callable, dict]:
    """The model of a fast_weight_transformer, a function that compares a model with fairseq's, and the tokenizers of both
    languages."""
    dictionaries = [task.source_dictionary, task.target_dictionary]
    model = translation.build(source)
    translation.set_generation(model, task.target_dictionary)
    first, second = (word_tokenizer(words, before=False) for words in dictionaries)
    return model, functools.partial(translation.compare, source, dictionaries=dictionaries), {"": first, TARGET: second}
