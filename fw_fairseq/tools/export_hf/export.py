"""fw-export-hf builds the model, compares it with fairseq's, and writes the folder."""

from __future__ import annotations

import functools
import math
import os
import shutil
from pathlib import Path

from ...errors import Mistake
from ...files import tokenizer_size
from ...patches.non_finite import NotFinite, why_not_finite
from ..checkpoints import first_symbol, load_model
from . import language_models, translation
from .folders import TARGET, TOLERANCE, check_alone, check_output, load, replace, write
from .tokenizers import renumber, word_tokenizer

PROG = "fw-export-hf"
ARCHITECTURES = ("fast_weight_lm", "fast_weight_transformer")


def export(checkpoint, output, data=None, tokenizer=None, force: bool = False):
    """Writes the folder ``output`` and returns the model in it.

    data: the folder with dict.txt, or with those of both languages; by default that of the training. tokenizer: a folder with a
    GPT-2 tokenizer, if the symbols of the dictionary are its numbers, as fw-convert writes them. Without it, the words of the
    dictionary become a tokenizer.
    """
    output = Path(output).resolve()
    check_output(output, force)
    source, task = load_model(checkpoint, data, PROG, ARCHITECTURES)
    if hasattr(source, "encoder"):
        model, compare, tokenizers = translation_model(source, task, tokenizer)
    else:
        model, compare, tokenizers = language_model(source, task, tokenizer)
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        check(compare(model), source, checkpoint)
        write(model, tokenizers, temporary)
        check(compare(load(type(model), temporary)), source, checkpoint)
        check_sizes(model.config, temporary, tokenizers)
        check_alone(temporary, f"CHECKPOINT {checkpoint}")
        check_output(output, force)
        replace(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return model


def check(difference: float, source, checkpoint) -> None:
    """Refuses a model that computes something else than fairseq's."""
    if math.isnan(difference):
        raise NotFinite(f"CHECKPOINT {checkpoint} computes NaN; {why_not_finite(source)}, and nothing was written")
    if not difference <= TOLERANCE:
        raise Mistake(f"CHECKPOINT {checkpoint} computes other logits in transformers, by {difference:.1e}; nothing was written")


def check_sizes(config, folder: Path, tokenizers: dict) -> None:
    """Refuses a folder whose tokenizers have other numbers of tokens than its model. tokenizers: by their places in it."""
    sides = ("encoder", "decoder") if config.is_encoder_decoder else ("",)
    for side, place in zip(sides, tokenizers):
        words, tokens = getattr(config, side, config).vocab_size, tokenizer_size(folder / place)
        if words != tokens:
            raise Mistake(f"the tokenizer would have {tokens} tokens and the model {words}; nothing was written")


def language_model(source, task, tokenizer):
    """Returns the model of a fast_weight_lm, a function that compares a model with fairseq's, and its tokenizer."""
    dictionary, first = task.source_dictionary, first_symbol(task)
    if len(task.target_dictionary) != len(dictionary):
        raise Mistake("CHECKPOINT was trained with --output-dictionary-size, which fw-export-hf does not have")
    if tokenizer is not None and first != dictionary.eos():
        raise Mistake(
            "--tokenizer is a GPT-2's, which has no <s>, and CHECKPOINT was trained with --add-bos-token; leave --tokenizer out for"
            " the words of dict.txt"
        )
    model, order = language_models.build(source.decoder), None
    model.config.update({"bos_token_id": first, "eos_token_id": dictionary.eos(), "pad_token_id": dictionary.pad()})
    if tokenizer is not None:
        order = renumber(model, dictionary, Path(tokenizer))
    compare = functools.partial(language_models.compare, source, words=len(dictionary), order=order)
    return model, compare, {"": word_tokenizer(dictionary, first=first) if tokenizer is None else Path(tokenizer)}


def translation_model(source, task, tokenizer):
    """Returns the model of a fast_weight_transformer, a function that compares a model with fairseq's, and the tokenizers of both
    languages."""
    if tokenizer is not None:
        raise Mistake(
            "--tokenizer is for a CHECKPOINT that fw-convert made of a GPT-2; a translation model has the words of its data"
        )
    dictionaries = [task.source_dictionary, task.target_dictionary]
    model = translation.build(source)
    translation.set_generation(model, task.target_dictionary)
    first, second = (word_tokenizer(words, before=False) for words in dictionaries)
    return model, functools.partial(translation.compare, source, dictionaries=dictionaries), {"": first, TARGET: second}
