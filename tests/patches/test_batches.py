"""A run that resumes within an epoch with another number of workers reads each batch once."""

from __future__ import annotations

import pytest
import torch
from fairseq.data import iterators
from torch.utils.data import TensorDataset

import fw_fairseq.models  # noqa: F401
from fw_fairseq import Mistake
from fw_fairseq.data.loading import BatchIterator


def numbers(items: list) -> tuple[int, ...]:
    return tuple(int(number) for (number,) in items)


def iterator(workers: int, worker: int, kind=iterators.EpochBatchIterator, batches: int = 46):
    data = TensorDataset(torch.arange(3 * batches))
    cut = [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(batches)]
    return kind(data, numbers, cut, seed=5, num_shards=workers, shard_id=worker)


def read(of, count: int | None = None) -> list[tuple]:
    batches = of.next_epoch_itr(shuffle=True)
    return [batch for batch in (batches if count is None else (next(batches) for _ in range(count))) if batch]


@pytest.mark.parametrize("kind", [iterators.EpochBatchIterator, BatchIterator])
@pytest.mark.parametrize(
    "before, place, after, twice",
    [(1, 32, 2, 0), (2, 16, 1, 0), (2, 6, 4, 0), (3, 4, 2, 0), (2, 7, 2, 0), (1, 13, 2, 1), (4, 5, 3, 2), (1, 1, 2, 1)],
)
def test_the_workers_of_a_resumed_epoch_read_what_is_left(kind, before, place, after, twice):
    """What they cannot share they read again; nothing is left out."""
    first = [iterator(before, worker, kind) for worker in range(before)]
    seen = [batch for of in first for batch in read(of, place)]
    resumed = [iterator(after, worker, kind) for worker in range(after)]
    for of in resumed:
        of.load_state_dict(first[0].state_dict())
    rest = [batch for of in resumed for batch in read(of)]
    assert {*seen, *rest} == {*read(iterator(1, 0))} and len(seen) + len(rest) == 46 + twice
    assert len({*seen} & {*rest}) == twice and all(of.end_of_epoch() for of in resumed)
    assert resumed[0].state_dict()["iterations_in_epoch"] == 0


def test_an_epoch_of_other_batches_is_refused():
    """Its place would be another one. Between epochs any size of batches goes on; so does a checkpoint of fairseq itself."""
    of, other = iterator(1, 0), iterator(1, 0, batches=23)
    read(of)
    ended = of.state_dict()
    read(of, 8)
    said = (
        "^the epoch has 23 batches, but the checkpoint stopped within one of 46; resume with the same data and size of batches, or"
    )
    with pytest.raises(Mistake, match=said):
        other.load_state_dict(of.state_dict())
    other.load_state_dict(ended)
    assert (other.next_epoch_idx, len(read(other))) == (2, 23)
    other = iterator(1, 0, batches=23)
    other.load_state_dict({name: value for name, value in of.state_dict().items() if name not in ("workers", "batches")})
    assert len(read(other)) == 15
