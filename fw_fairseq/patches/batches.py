"""Batches: none is lost, a resumed run has the same ones, and diverse beams find their rows."""

from __future__ import annotations

import numpy


def __del__(original, text):
    """Of a binarised text that could not be opened: there is nothing to close."""
    if hasattr(text, "_bin_buffer_mmap"):
        original(text)


def batch_by_size(original, indices, *args, **kwargs):
    """fairseq 0.12.3 leaves out the last batch if its size is not a multiple of 8: sentences never translated, never scored."""
    indices = numpy.fromiter(indices, dtype=numpy.int64)
    if not len(indices):
        return []  # it would look for the last batch
    batches = list(original(indices, *args, **kwargs))
    rest = indices[sum(map(len, batches)) :]
    return batches + ([rest] if len(rest) else [])


def get_batch_iterator(original, task, dataset, *args, epoch=1, **kwargs):
    """fairseq composes a run's batches once, and differently in each epoch that a run can begin with: resumed after its first epoch
    it was another run. Here all have the batches of the first. And a text without a batch is not evaluated to perplexity 1."""
    once = (
        task.can_reuse_epoch_itr(dataset) and not kwargs.get("disable_iterator_cache") and not kwargs.get("update_epoch_batch_itr")
    )
    if not once or dataset in task.dataset_to_epoch_iter:
        return original(task, dataset, *args, epoch=epoch, **kwargs)
    iterator = original(task, dataset, *args, epoch=1, **kwargs)
    if len(dataset) and not iterator.frozen_batches:
        most = kwargs.get("max_positions")
        raise ValueError(
            f"all {len(dataset)} texts are longer than the model's {most} positions; give a shorter --tokens-per-sample"
        )
    iterator.epoch = max(epoch, 1)
    dataset.set_epoch(epoch)
    return iterator


def step(original, search, step, lprobs, scores, prev_output_tokens=None, original_batch_idxs=None):
    """Diverse beams look their overlaps up by the sentences' numbers in the data set; it is their rows in the batch they need."""
    if original_batch_idxs is not None:
        if step == 0:
            search.first_idxs = original_batch_idxs
        original_batch_idxs = original_batch_idxs.unsqueeze(1).eq(search.first_idxs).int().argmax(1)
    return original(search, step, lprobs, scores, prev_output_tokens, original_batch_idxs)
