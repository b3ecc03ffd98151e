"""Texts

A file is in UTF-8, and a line is counted whole and fits into a batch.
"""

from __future__ import annotations

import numpy
from fairseq import binarizer
from fairseq.data import LMContextWindowDataset, MonolingualDataset, TokenBlockDataset, dictionary

from ..errors import Mistake
from .replacing import replaces

TOKENS = 36000  # of a batch of fairseq-eval-lm without --max-tokens


@replaces(dictionary, "find_offsets")
@replaces(binarizer, "find_offsets")
def refuse_other_encodings(original, filename, *args):
    """A text that is not in UTF-8 ends `fairseq-preprocess` in a traceback that does not name the file. Now one sentence names the
    file and the line, before any worker starts."""
    with open(filename, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                said = f"{filename} is no text in UTF-8 (line {number})"
                raise Mistake(f"{said}; convert it, for example with iconv -f latin1 -t utf8") from None
    return original(filename, *args)


@replaces(TokenBlockDataset, "_build_slice_indices")
def count_long_lines_whole(original, dataset, *args):
    """With `--sample-break-mode eos` and `complete` fairseq counts the tokens of a sample modulo 65,536, so that a line of 65,600
    passes for one of 64, whatever `--max-tokens` and the model's positions are. Now all tokens count."""
    sizes, blocks, places = original(*args)
    whole = places[:, 1] - places[:, 0]
    return whole if (whole != sizes).any() else sizes, blocks, places


def refuse_lines_longer_than_a_batch(task, dataset, max_tokens=None, max_sentences=None, max_positions=None, **options) -> None:
    """Refuses a sample of a language model's text that no batch holds. Those that are longer than the model's positions are
    fairseq's to leave out or to refuse."""
    text = dataset.dataset if isinstance(dataset, LMContextWindowDataset) else dataset
    if not isinstance(text, MonolingualDataset):
        return
    sizes = numpy.asarray(text.sizes)
    longest = int(sizes[sizes <= max_positions].max(initial=0) if isinstance(max_positions, int) else sizes.max(initial=0))
    most = max_tokens or max(TOKENS, (max_sentences or 1) * task.args.tokens_per_sample)
    if longest > most:
        said = f"a batch holds at most {most} tokens, and a sample has {longest}"
        raise Mistake(f"{said}; give {shorter(task, most)} or a larger --max-tokens")


def shorter(task, most) -> str:
    """Returns what makes samples of at most ``most`` tokens."""
    args = getattr(task, "args", task.cfg)
    if not hasattr(args, "tokens_per_sample"):
        return "shorter texts"
    mode = str(getattr(args, "sample_break_mode", None))
    lines = mode == "eos" or (mode.startswith("complete") and args.tokens_per_sample <= most)  # in which a line is whole
    return "--sample-break-mode none" if lines else "a shorter --tokens-per-sample"
