"""A batch iterator whose loader processes end with its batches."""

from __future__ import annotations

from collections.abc import Iterator

from fairseq.data import iterators
from torch.utils.data import DataLoader


class BatchIterator(iterators.EpochBatchIterator):
    """For tasks that make an iterator for every epoch and validation. fairseq's keeps its loader processes, and refers to itself:
    the processes stay until Python searches for such circles, which then waits seconds for each. This one's end with the last
    batch of an epoch, or when the batches are let go before.

    ``buffer_size``: so many batches at least are loaded ahead, by the processes; without processes none.
    """

    def _get_iterator_for_epoch(
        self, epoch: int, shuffle: bool, fix_batches_to_gpus: bool = False, offset: int = 0
    ) -> iterators.CountingIterator | None:
        batches = self.ordered_batches(epoch, fix_batches_to_gpus, shuffle)[offset:]
        if offset and not batches:
            return None
        ahead = {"prefetch_factor": max(2, -(-self.buffer_size // self.num_workers))} if self.num_workers else {}
        loader = DataLoader(
            self.dataset,
            batch_sampler=batches,
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
            timeout=self.timeout,
            pin_memory=True,
            **ahead,
        )
        return iterators.CountingIterator(released(loader), start=offset, total=offset + len(batches))


def released(loader: DataLoader) -> Iterator:
    """Its batches. The processes end before the last one is handed over: whoever has it need not ask for more."""
    batches = iter(loader)
    for _ in range(len(loader) - 1):
        yield next(batches)
    last = next(batches)
    del batches
    yield last
