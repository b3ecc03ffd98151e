"""Text as parallel streams: row b of every batch goes on where row b of the batch before stopped."""

from __future__ import annotations

import logging

import torch
from fairseq.data import iterators

from ..modules import Streams
from ..ops.state import SavedState
from .loading import BatchIterator
from .text import Text

logger = logging.getLogger(__name__)


class StreamDataset(torch.utils.data.Dataset):
    """Item s is the whole batch of segment s: ``rows`` streams of one worker, cut out of ``shards * rows`` equal parts of the text.

    Every token is a target once; the first of a stream is predicted from ``eos``. Rows differ in length by at most one token,
    which the last segment makes up with padding. ``share`` (i, n): only share i, from 0, of n equal ones of each segment.
    """

    def __init__(self, text: Text, segment: int, rows: int, pad: int, eos: int, shard: int = 0, shards: int = 1, share=(0, 1)):
        tokens, parts = text.tokens, rows * shards
        if len(tokens) < parts:
            raise ValueError(
                f"--batch-size is {rows} on {shards} workers but {text.split} has {len(tokens)} tokens; use at most that many"
            )
        self.bounds = [(part * len(tokens) // parts, (part + 1) * len(tokens) // parts) for part in range(parts)]
        self.tokens, self.targets, self.segment, self.pad, self.eos = tokens, text.targets, segment, pad, eos
        self.rows = self.bounds[shard * rows : (shard + 1) * rows]
        self.share, self.shares = share
        self.longest = max(stop - start for start, stop in self.bounds)

    def __len__(self) -> int:
        return -(-self.longest // self.segment)

    def __getitem__(self, index: int) -> dict:
        width = -(-min(self.segment, self.longest - index * self.segment) // self.shares) * self.shares
        target = torch.full((len(self.rows), width), self.pad)
        source = torch.full((len(self.rows), width), self.pad)
        for row, (start, stop) in enumerate(self.rows):
            first, last = start + index * self.segment, min(start + index * self.segment + width, stop)
            before = self.tokens[first - 1 : first] if index else torch.tensor([self.eos])
            target[row, : last - first] = self.targets[first:last]
            source[row, : last - first] = torch.cat([before, self.tokens[first : last - 1]])[: last - first]
        target, source = (x.chunk(self.shares, 1)[self.share].contiguous() for x in (target, source))
        return {
            "id": torch.arange(len(self.rows)) + index * len(self.rows),
            "segment": index,
            "nsentences": len(self.rows),
            "ntokens": int(target.ne(self.pad).sum()),
            "net_input": {"src_tokens": source, "src_lengths": source.ne(self.pad).sum(1)},
            "target": target,
        }


class StreamIterator(BatchIterator):
    """Segments in order, with the memories of their streams: training and validation may read one text. Its saved state is the
    position and what the memories hold there, those of every shard."""

    def __init__(self, dataset: StreamDataset, streams: Streams, shard: int = 0, shards: int = 1, **options):
        batches = [[index] for index in range(len(dataset))]
        super().__init__(dataset, collate_fn=take_only, batch_sampler=batches, disable_shuffling=True, **options)
        self.streams, self.shard, self.shards, self.shares = streams, shard, shards, dataset.shares
        self.collected: list[dict] = [{} for _ in range(shards)]

    def _get_iterator_for_epoch(self, epoch, shuffle, offset=0, **options):
        """The state joins the batches here, behind the processes that load them."""
        batches = super()._get_iterator_for_epoch(epoch, shuffle, offset=offset, **options)
        if batches is None:
            return None
        streams = {"streams": self.streams}
        return iterators.CountingIterator((batch | streams for batch in batches), start=offset, total=batches.total)

    def collect(self) -> None:
        """Before ``state_dict``, which only one of several workers calls: brings their memories together."""
        if self.shards > 1:
            by_worker: list[dict] = [{}] * (self.shards * self.shares)
            torch.distributed.all_gather_object(by_worker, self.memories())
            self.collected = by_worker[:: self.shares]

    def memories(self) -> dict[int, tuple]:
        return {layer: tuple(state.detach().to("cpu")) for layer, state in self.streams.last().items()}

    def state_dict(self) -> dict:
        cut = {"segment": self.dataset.segment, "rows": len(self.dataset.rows)}
        return super().state_dict() | cut | {"carried": self.collected if self.shards > 1 else [self.memories()]}

    def load_state_dict(self, state_dict: dict) -> None:
        memories, within = state_dict.get("carried", []), state_dict.get("iterations_in_epoch", 0) > 0
        if within:
            self.check_cut(state_dict, len(memories))
        super().load_state_dict(state_dict)
        self.streams.restart()
        if not within:
            return
        if len(memories) != self.shards:
            logger.warning("the checkpoint has %d sets of streams, not %d: all start empty", len(memories), self.shards)
        else:
            self.streams.restart({layer: SavedState(state) for layer, state in memories[self.shard].items()})

    def check_cut(self, state_dict: dict, shards: int) -> None:
        """The position is a number of segments: of others it is another place in the text, which the memories have not read to."""
        cut = [("--tokens-per-sample", "segment", self.dataset.segment)]
        if shards == self.shards:
            cut.append(("--batch-size, the streams of a worker,", "rows", len(self.dataset.rows)))
        for option, name, now in cut:
            saved = state_dict.get(name, now)
            if saved != now:
                help_ = f"go on with {saved}, or read the text from its start with --reset-dataloader"
                raise ValueError(f"{option} is {now}, but the checkpoint stopped within the text with {saved}; {help_}")


def take_only(items: list[dict]) -> dict:
    return items[0]
