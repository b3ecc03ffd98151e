"""Batches and search

No sentence is lost, a resumed run has the same batches, diverse beams find their rows, and n-grams do not repeat.
"""

from __future__ import annotations

import logging
import math
import types

import numpy
import torch
from fairseq.data import data_utils, indexed_dataset, iterators
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.search import DiverseBeamSearch
from fairseq.tasks.fairseq_task import FairseqTask

from ..errors import Mistake
from .replacing import changes, replaces
from .texts import refuse_lines_longer_than_a_batch, shorter

logger = logging.getLogger(__name__)


@changes("numpy.compat")
def provide_numpy_compat() -> None:
    """`fairseq-generate` and `fairseq-interactive` ask for `numpy.compat.long`, which NumPy 2 no longer has, and stop with an
    AttributeError. Now `numpy.compat.long` is `int` where NumPy does not have it."""
    if not hasattr(numpy, "compat"):
        numpy.compat = types.SimpleNamespace(long=int)  # noqa: NPY201


@replaces(indexed_dataset.MMapIndexedDataset, "__del__")
@replaces(indexed_dataset.MMapIndexedDataset.Index, "__del__")
def close_only_what_was_opened(original, text) -> None:
    """fairseq closes the file of a binarised text that it could not open, and prints a second error over the first. Now it closes
    only open files."""
    if hasattr(text, "_bin_buffer_mmap"):
        original(text)


@replaces(data_utils, "batch_by_size")
def keep_the_last_batch(original, indices, *args, **kwargs) -> list:
    """fairseq drops the last batch if its size is not a multiple of `--required-batch-size-multiple`, so sentences are neither
    translated nor scored. An empty list of sentences makes it fail. Now the last batch holds the rest, and no sentences make no
    batches."""
    if isinstance(indices, numpy.ndarray):
        indices = numpy.asarray(indices, dtype=numpy.int64)
    else:
        indices = numpy.fromiter(indices, dtype=numpy.int64)
    if not len(indices):
        return []
    batches = list(original(indices, *args, **kwargs))
    rest = indices[sum(map(len, batches)) :]
    return batches + ([rest] if len(rest) else [])


@replaces(FairseqTask, "get_batch_iterator")
def make_the_batches_of_the_first_epoch(original, task, dataset, *args, epoch=1, **kwargs):
    """fairseq composes the batches of a run once, and the epoch that the run starts in decides how. A run that is resumed after its
    first epoch therefore has other batches than one that was not interrupted. Now every run has the batches of the first epoch. If
    all texts are too long for the model, fairseq evaluates nothing and reports a perplexity of 1; now this is an error. A line of
    any length is one sample where no option limits it, and can take all memory; now a line that is longer than a batch is refused,
    at more than 36,000 tokens if neither `--max-tokens` nor `--batch-size` allows for it."""
    refuse_lines_longer_than_a_batch(task, dataset, **kwargs)
    once = (
        task.can_reuse_epoch_itr(dataset) and not kwargs.get("disable_iterator_cache") and not kwargs.get("update_epoch_batch_itr")
    )
    if not once or dataset in task.dataset_to_epoch_iter:
        return original(task, dataset, *args, epoch=epoch, **kwargs)
    iterator = original(task, dataset, *args, epoch=1, **kwargs)
    if len(dataset) and not iterator.frozen_batches:
        raise Mistake(too_long(task, len(dataset), kwargs.get("max_positions"), kwargs.get("max_tokens")))
    iterator.epoch = max(epoch, 1)
    dataset.set_epoch(epoch)
    return iterator


@replaces(iterators.EpochBatchIterator, "state_dict")
def count_the_workers(original, iterator) -> dict:
    """A checkpoint's place within an epoch is a number of batches of one worker. Now the checkpoint also says how many workers
    there were, and how many batches the epoch has."""
    state = original(iterator)
    if isinstance(iterator, iterators.GroupedEpochBatchIterator):
        return state
    return state | {"workers": iterator.num_shards, "batches": len(iterator.frozen_batches)}


@replaces(iterators.EpochBatchIterator, "load_state_dict")
def go_on_with_other_workers(original, iterator, state_dict: dict) -> None:
    """If a run resumes within an epoch with another number of workers, fairseq skips batches or reads them twice, or it stops with
    a RuntimeError. Now it goes on after the batches that all workers have read; where their number cannot be shared, it reads the
    last few again. An epoch that has another number of batches is refused."""
    place, before = state_dict.get("iterations_in_epoch", 0), state_dict.get("workers")
    if place and before and not isinstance(iterator, iterators.GroupedEpochBatchIterator):
        now, batches, count = iterator.num_shards, state_dict["batches"], len(iterator.frozen_batches)
        if batches != count:
            said = f"the epoch has {count} batches, but the checkpoint stopped within one of {batches}"
            raise Mistake(f"{said}; resume with the same data and size of batches, or begin it again with --reset-dataloader")
        state_dict = state_dict | {"iterations_in_epoch": place * before // now}
        if again := place * before % now:
            logger.info(
                "%d workers cannot share the %d batches that were read; the last %d are read again", now, place * before, again
            )
    original(iterator, state_dict)


def too_long(task, count: int, positions, max_tokens: int | None = None) -> str:
    most = f"--max-tokens, {max_tokens}" if positions == max_tokens else f"the model's {positions} positions"
    return f"all {count} texts are longer than {most}; give {shorter(task, positions)}"


@replaces(DiverseBeamSearch, "step")
def number_rows_within_the_batch(original, search, step, lprobs, scores, prev_output_tokens=None, original_batch_idxs=None):
    """Diverse beam search looks up what other groups generated by the sentence's number in the data set, which is not its row in
    the batch, and reads beyond the batch or another sentence. Now it uses the row. Hypotheses go on after their end where others
    are still searched for; now they do not."""
    rows, beams = lprobs.shape[:2]
    if step:
        ended = prev_output_tokens[:, -1].view(rows, beams, 1).eq(search.eos)
        lprobs = lprobs.masked_fill(ended, -math.inf)
    if original_batch_idxs is not None:
        if step == 0:
            search.first_idxs = original_batch_idxs
        original_batch_idxs = original_batch_idxs.unsqueeze(1).eq(search.first_idxs).int().argmax(1)
    found = original(search, step, lprobs, scores, prev_output_tokens, original_batch_idxs)
    impossible_last = found[0].isneginf().int().argsort(dim=1, stable=True)  # fairseq ends hypotheses of the first places
    return tuple(x.gather(1, impossible_last) for x in found)


@replaces(NGramRepeatBlock, "_no_repeat_ngram")
def compare_with_the_tokens_so_far(original, block, tokens, lprobs, bsz, beam_size, step):
    """Without its CUDA extension, `--no-repeat-ngram-size` compares with the end of the buffer of tokens, which is padding until
    the last step, and so forbids nothing. Now it compares with the tokens so far. A size of 1 forbids all words so far. A word that
    `--prefix-size`, a prompt or the greatest length prescribes is allowed, where search would have no word left."""
    before, written = lprobs.clone(), tokens[:, : step + 1]
    if block.no_repeat_ngram_size > 1:
        lprobs = original(block, written, lprobs, bsz, beam_size, step)
    else:
        lprobs = lprobs.scatter_(1, written[:, 1:], -math.inf)
    return torch.where(lprobs.isneginf().all(1, keepdim=True), before, lprobs)
