"""Texts, batches and search

A text fits its index, no sentence is lost, a resumed run has the same batches, diverse beams find their rows, and n-grams do not
repeat.
"""

from __future__ import annotations

import logging
import math
import os
import struct
import types
from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch
from fairseq.data import (
    Dictionary,
    LMContextWindowDataset,
    MonolingualDataset,
    TokenBlockDataset,
    data_utils,
    indexed_dataset,
    iterators,
)
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.search import DiverseBeamSearch
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.tasks.language_modeling import LanguageModelingTask
from torch import Tensor

from ..errors import Mistake
from ..files import why
from .progress import Announced
from .replacing import changes, replaces

TOKENS = 36000  # of a batch of fairseq-eval-lm without --max-tokens
logger = logging.getLogger(__name__)


@changes("numpy.compat")
def provide_numpy_compat() -> None:
    """`fairseq-generate` and `fairseq-interactive` need `numpy.compat.long`, which NumPy 2 lacks. Now it is `int`."""
    if not hasattr(numpy, "compat"):
        numpy.compat = types.SimpleNamespace(long=int)  # type: ignore[attr-defined]  # noqa: NPY201


@replaces(indexed_dataset, "make_dataset")
def check_binarised_text(original: Callable, path: str, impl: str, fix_lua_indexing: bool = False, dictionary: Any = None) -> Any:
    """fairseq fails late, or trains on nonsense, if the index, the tokens and the dictionary of a binarised text do not fit. Now
    such a text is refused when it is opened."""
    try:
        dataset = original(path, impl, fix_lua_indexing, dictionary)
        said = why_no_text(dataset._index, path, dictionary) if impl == "mmap" and dataset is not None else None
    except (AssertionError, AttributeError, KeyError, OverflowError, ValueError, struct.error) as error:
        said = why(error)
    if said:
        raise Mistake(f"{path}.bin and {path}.idx are not a binarised text ({said}); run fairseq-preprocess again")
    return dataset


def why_no_text(index: Any, path: str, dictionary: Dictionary | None) -> str | None:
    """Returns how an index contradicts itself, the size of the tokens' file or the dictionary."""
    dtype, sizes = numpy.dtype(index.dtype), index.sizes.astype(numpy.int64)
    ends, content = sizes.cumsum() * dtype.itemsize, os.path.getsize(f"{path}.bin")
    whole = ends[-1] if len(ends) else 0
    if (sizes < 0).any() or not numpy.array_equal(index._pointers, ends - sizes * dtype.itemsize):
        return "the index contradicts itself"
    if content != whole:
        return f"there are {content} bytes of tokens, and the index names {whole}"
    if dictionary is None:
        return None
    tokens = numpy.memmap(f"{path}.bin", dtype=dtype, mode="r")
    least, most = tokens.min(), tokens.max()
    fits = least >= 0 and most < len(dictionary) and dtype.kind != "f"
    return None if fits else f"it has tokens from {least} to {most}, and the dictionary has {len(dictionary)} words"


@replaces(TokenBlockDataset, "_build_slice_indices")
def count_long_lines_whole(original: Callable, dataset: TokenBlockDataset, *args) -> tuple:
    """With `--sample-break-mode eos` and `complete` fairseq counts the tokens of a sample modulo 65,536. Now all tokens count."""
    sizes, blocks, places = original(*args)
    whole = places[:, 1] - places[:, 0]
    return whole if (whole != sizes).any() else sizes, blocks, places


@replaces(data_utils, "batch_by_size")
def keep_the_last_batch(original: Callable, indices: Iterable[int], *args, **kwargs) -> list:
    """fairseq drops the last batch if its size is not a multiple of `--required-batch-size-multiple`, so some sentences are neither
    translated nor scored. Now the last batch holds the rest."""
    indices = numpy.asarray(indices if isinstance(indices, numpy.ndarray) else [*indices], dtype=numpy.int64)
    if not len(indices):
        return []
    batches = list(original(indices, *args, **kwargs))
    rest = indices[sum(map(len, batches)) :]
    return batches + ([rest] if len(rest) else [])


@replaces(FairseqTask, "get_batch_iterator")
def make_the_batches_of_the_first_epoch(original: Callable, task: Any, dataset: Any, *args, epoch: int = 1, **kwargs) -> Any:
    """fairseq composes its batches by the epoch in which a run starts, so a resumed run has other ones. Now every run has those of
    the first epoch. If all texts are too long for the model, fairseq reports a perplexity of 1; now this is an error. A line that
    is longer than a batch is refused, at more than 36,000 tokens if neither `--max-tokens` nor `--batch-size` allows for it."""
    refuse_lines_longer_than_a_batch(task, dataset, kwargs)
    anew = not task.can_reuse_epoch_itr(dataset) or kwargs.get("disable_iterator_cache") or kwargs.get("update_epoch_batch_itr")
    if anew or dataset in task.dataset_to_epoch_iter:
        return original(task, dataset, *args, epoch=epoch, **kwargs)
    iterator = original(task, dataset, *args, epoch=1, **kwargs)
    if len(dataset) and not iterator.frozen_batches:
        positions, most = kwargs.get("max_positions"), kwargs.get("max_tokens")
        than = f"--max-tokens, {most}" if positions == most else f"the model's {positions} positions"
        raise Mistake(f"all {len(dataset)} texts are longer than {than}; give {shorter(task, positions)}")
    iterator.epoch = max(epoch, 1)
    dataset.set_epoch(epoch)
    return iterator


def refuse_lines_longer_than_a_batch(task: Any, dataset: Any, limits: dict) -> None:
    """Refuses a sample of a language model's text that no batch holds. Those that are longer than the model's positions are
    fairseq's to leave out or to refuse."""
    text = dataset.dataset if isinstance(dataset, LMContextWindowDataset) else dataset
    if not isinstance(text, MonolingualDataset):
        return
    sizes, positions = numpy.asarray(text.sizes), limits.get("max_positions")
    longest = int((sizes[sizes <= positions] if isinstance(positions, int) else sizes).max(initial=0))
    most = limits.get("max_tokens") or max(TOKENS, (limits.get("max_sentences") or 1) * task.args.tokens_per_sample)
    if longest > most:
        said = f"a batch holds at most {most} tokens, and a sample has {longest}"
        raise Mistake(f"{said}; give {shorter(task, most)} or a larger --max-tokens")


def shorter(task: FairseqTask, most: Any) -> str:
    """Returns what makes samples of at most ``most`` tokens."""
    args = getattr(task, "args", task.cfg)
    if not hasattr(args, "tokens_per_sample"):
        return "shorter texts"
    mode = str(getattr(args, "sample_break_mode", None))
    lines = mode == "eos" or (mode.startswith("complete") and args.tokens_per_sample <= most)  # in which a line is whole
    return "--sample-break-mode none" if lines else "a shorter --tokens-per-sample"


@replaces(iterators.EpochBatchIterator, "state_dict")
def count_the_workers(original: Callable, iterator: iterators.EpochBatchIterator) -> dict:
    """A checkpoint gives its place within an epoch as a number of batches of one worker. Now it also has the number of workers and
    of the epoch's batches."""
    state = original(iterator)
    if isinstance(iterator, iterators.GroupedEpochBatchIterator):
        return state
    return state | {"workers": iterator.num_shards, "batches": len(iterator.frozen_batches)}


@replaces(iterators.EpochBatchIterator, "load_state_dict")
def go_on_with_other_workers(original: Callable, iterator: iterators.EpochBatchIterator, state_dict: dict) -> None:
    """With another number of workers, fairseq resumes within an epoch at a wrong batch, or stops. Now a run continues after the
    batches that all workers have read; where their number cannot be shared, it reads the last few again. An epoch with another
    number of batches is refused."""
    place, before = state_dict.get("iterations_in_epoch", 0), state_dict.get("workers")
    if place and before and not isinstance(iterator, iterators.GroupedEpochBatchIterator):
        now, batches, count = iterator.num_shards, state_dict["batches"], len(iterator.frozen_batches)
        if batches != count:
            said = f"the epoch has {count} batches, but the checkpoint stopped within one of {batches}"
            raise Mistake(f"{said}; resume with the same data and size of batches, or begin it again with --reset-dataloader")
        state_dict = state_dict | {"iterations_in_epoch": place * before // now}
        if again := place * before % now:
            said = "%d workers cannot share the %d batches that were read; the last %d are read again"
            logger.info(said, now, place * before, again)
    original(iterator, state_dict)


@replaces(LanguageModelingTask, "eval_lm_dataloader")
def score_every_block(original: Callable, task: Any, dataset: Any, *args, **kwargs) -> Iterable:
    """`fairseq-eval-lm` leaves out texts that are longer than the model's positions, and reports the perplexity of the others. Now
    it refuses them. The log shows the progress of an evaluation."""
    sizes, most = numpy.asarray(dataset.sizes), kwargs.get("max_positions")
    tokens = int(min(sizes.max(initial=0) + kwargs.get("context_window", 0), sizes.sum()))
    if isinstance(most, int) and tokens > most:
        raise Mistake(f"texts of {tokens} tokens are longer than the model's {most} positions; give {shorter(task, most)}")
    words = int(sizes.sum()) // max(1, kwargs.get("num_shards", 1))
    return Announced(original(task, dataset, *args, **kwargs), words)


@replaces(LMContextWindowDataset, "collater")
def read_the_context_from_the_text(original: Callable, windows: LMContextWindowDataset, samples: list[dict]) -> dict:
    """`--context-window` takes as context what the same process has read last, so the perplexity is wrong with several
    `--num-workers` or shards. Now it takes the words before."""
    context: list[numpy.ndarray] = []
    at, missing = int(samples[0]["id"]) if samples else 0, windows.context_window
    while at and missing > 0:
        at -= 1
        context.insert(0, windows.dataset[at]["source"][-missing:].numpy())
        missing -= len(context[0])
    windows.prev_tokens = numpy.concatenate(context) if context else numpy.empty([0])
    return original(windows, samples) if samples else {}


@replaces(DiverseBeamSearch, "step")
def number_rows_within_the_batch(
    original: Callable, search: Any, step: int, lprobs: Tensor, scores: Tensor, tokens: Any = None, sentences: Any = None
) -> tuple[Tensor, ...]:
    """Diverse beam search looks other groups up by the sentence's number in the data set. Now it uses the row in the batch.
    Finished hypotheses no longer grow while others are searched for."""
    rows, beams = lprobs.shape[:2]
    if step:
        lprobs = lprobs.masked_fill(tokens[:, -1].view(rows, beams, 1).eq(search.eos), -math.inf)
    if sentences is not None:
        if step == 0:
            search.first_idxs = sentences
        sentences = sentences.unsqueeze(1).eq(search.first_idxs).int().argmax(1)
    found = original(search, step, lprobs, scores, tokens, sentences)
    impossible_last = found[0].isneginf().int().argsort(dim=1, stable=True)  # fairseq ends hypotheses of the first places
    return tuple(x.gather(1, impossible_last) for x in found)


@replaces(NGramRepeatBlock, "_no_repeat_ngram")
def compare_with_the_tokens_so_far(
    original: Callable, block: Any, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int
) -> Tensor:
    """Without its CUDA extension, `--no-repeat-ngram-size` forbids nothing until the last step. Now it compares with the tokens so
    far. A word that `--prefix-size`, a prompt or the greatest length prescribes is allowed if no other word is left."""
    before, written = lprobs.clone(), tokens[:, : step + 1]
    if block.no_repeat_ngram_size > 1:
        lprobs = original(block, written, lprobs, bsz, beam_size, step)
    else:
        lprobs = lprobs.scatter_(1, written[:, 1:], -math.inf)
    return torch.where(lprobs.isneginf().all(1, keepdim=True), before, lprobs)
