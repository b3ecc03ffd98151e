"""fw-export-hf builds the model, compares it with fairseq's, and writes the folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ... import Mistake
from ..checkpoints import load_model
from . import language_models, translation
from .folders import TARGET, check_output, replace, write
from .tokenizers import renumber, word_tokenizer

PROG = "fw-export-hf"
ARCHITECTURES = ("fast_weight_lm", "fast_weight_transformer")
TOLERANCE = 1e-4


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
        model, difference, tokenizers = translation_model(source, task, tokenizer)
    else:
        model, difference, tokenizers = language_model(source, task.source_dictionary, tokenizer)
    if not difference <= TOLERANCE:
        raise Mistake(f"CHECKPOINT {checkpoint} computes other logits in transformers, by {difference:.1e}; nothing was written")
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        write(model, tokenizers, temporary)
        check_output(output, force)
        replace(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return model


def language_model(source, dictionary, tokenizer):
    """Returns the model of a fast_weight_lm, its difference from fairseq's, and its tokenizer."""
    model = language_models.build(source.decoder)
    difference = language_models.compare(source, model, len(dictionary))
    model.config.update({"bos_token_id": dictionary.eos(), "eos_token_id": dictionary.eos(), "pad_token_id": dictionary.pad()})
    if tokenizer is None:
        return model, difference, {"": word_tokenizer(dictionary)}
    renumber(model, dictionary, Path(tokenizer))
    return model, difference, {"": Path(tokenizer)}


def translation_model(source, task, tokenizer):
    """Returns the model of a fast_weight_transformer, its difference from fairseq's, and the tokenizers of both languages."""
    if tokenizer is not None:
        raise Mistake(
            "--tokenizer is for a CHECKPOINT that fw-convert made of a GPT-2; a translation model has the words of its data"
        )
    dictionaries = [task.source_dictionary, task.target_dictionary]
    model = translation.build(source)
    difference = translation.compare(source, model, dictionaries)
    translation.set_generation(model, task.target_dictionary)
    first, second = (word_tokenizer(words, before=False) for words in dictionaries)
    return model, difference, {"": first, TARGET: second}
