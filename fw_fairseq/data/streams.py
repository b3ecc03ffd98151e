"""Text as parallel streams: row b of every batch continues where row b of the batch before stopped."""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from fairseq.data import iterators

from ..errors import Mistake
from ..modules import Streams
from ..ops.state import SavedState
from .loading import BatchIterator
from .text import Text

logger = logging.getLogger(__name__)


class StreamDataset(torch.utils.data.Dataset):
    """Item s is the batch of segment s, with the ``rows`` streams of one worker. The text is cut into ``shards * rows`` streams.

    Every token is a target once, and the first of a stream is predicted from ``eos``. The lengths of streams differ by at most one
    token; the last segment is padded. ``share`` (i, n): the item is part i, from 0, of n equal parts of the segment.
    """

    def __init__(
        self,
        text: Text,
        segment: int,
        rows: int,
        pad: int,
        eos: int,
        shard: int = 0,
        shards: int = 1,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        if not 0 <= shard < shards:
            raise Mistake(f"--shard-id is {shard}; it must be at least 0 and less than --num-shards, {shards}")
        tokens, parts = text.tokens, rows * shards
        if len(tokens) < parts:
            raise Mistake(
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
    """Segments in order, with the states of their streams. Its saved state is the position and the states there, of every shard."""

    def __init__(self, dataset: StreamDataset, streams: Streams, shard: int = 0, shards: int = 1, **options) -> None:
        batches = [[index] for index in range(len(dataset))]
        super().__init__(dataset, collate_fn=take_only, batch_sampler=batches, disable_shuffling=True, **options)
        self.streams, self.shard, self.shards, self.shares = streams, shard, shards, dataset.shares
        self.collected: list[dict] = [{} for _ in range(shards)]

    def _get_iterator_for_epoch(self, epoch: int, shuffle: bool, fix_batches_to_gpus: bool = False, offset: int = 0) -> Any:
        """Adds the streams to the batches here, in the main process, after other processes have loaded them."""
        batches = super()._get_iterator_for_epoch(epoch, shuffle, fix_batches_to_gpus, offset)
        if batches is None:
            return None
        streams = {"streams": self.streams}
        return iterators.CountingIterator((batch | streams for batch in batches), start=offset, total=batches.total)

    def collect(self) -> None:
        """Collects the states of all workers. Each calls it before one of them calls ``state_dict``."""
        if self.shards > 1:
            by_worker: list[dict] = [{}] * (self.shards * self.shares)
            torch.distributed.all_gather_object(by_worker, self.memories())
            self.collected = by_worker[:: self.shares]

    def memories(self) -> dict[int | str, tuple]:
        return {layer: tuple(cast(SavedState, state).detach().to("cpu")) for layer, state in self.streams.last().items()}

    def state_dict(self) -> dict:
        cut = {"segment": self.dataset.segment, "rows": len(self.dataset.rows), "tokens": len(self.dataset.tokens)}
        place = {name: value for name, value in super().state_dict().items() if name not in ("workers", "batches")}
        return place | cut | {"carried": self.collected if self.shards > 1 else [self.memories()]}

    def load_state_dict(self, state_dict: dict) -> None:
        within = state_dict.get("iterations_in_epoch", 0) > 0
        if within:
            self.check_cut(state_dict)
        super().load_state_dict(state_dict)
        self.streams.restart(self.own_states(state_dict["carried"]) if within else None)

    def own_states(self, memories: list[dict[int | str, tuple]]) -> dict[int | str, Any]:
        """Returns the states of this worker's streams. The workers of the checkpoint had the same streams, but perhaps in other
        shares."""
        if len(memories) == self.shards:
            return {layer: SavedState(state) for layer, state in memories[self.shard].items()}
        rows = len(self.dataset.rows)
        own = slice(self.shard * rows, (self.shard + 1) * rows)
        states = {layer: [worker[layer] for worker in memories] for layer in memories[0] if all(layer in x for x in memories)}
        return {
            layer: SavedState(None if parts[0] is None else torch.cat(parts)[own] for parts in zip(*workers))
            for layer, workers in states.items()
        }

    def check_cut(self, state_dict: dict) -> None:
        """Refuses a checkpoint from within an epoch if the text is cut differently: its position, a number of segments, would be
        another place in the text than the states have read to."""
        if "carried" not in state_dict:
            help_ = "resume with its task, or read the text from its start with --reset-dataloader"
            raise Mistake(f"the checkpoint stopped within a text that was not read as streams; {help_}")
        if "segment" not in state_dict:
            logger.info("the checkpoint does not say how its text was cut into streams, so this is not checked")
        rows, shards = len(self.dataset.rows), len(state_dict["carried"])
        streams = state_dict.get("rows", rows) * shards
        same = streams / self.shards if streams % self.shards else streams // self.shards
        segment, text = self.dataset.segment, len(self.dataset.tokens)
        for option, saved, now in (
            ("--tokens-per-sample", state_dict.get("segment", segment), segment),
            ("--batch-size, the streams of a worker,", same, rows),
            ("the number of tokens of the text", state_dict.get("tokens", text), text),
        ):
            if saved != now:
                help_ = f"resume with {saved}, or read the text from its start with --reset-dataloader"
                raise Mistake(f"{option} is {now}, but the checkpoint stopped within the text with {saved}; {help_}")


def take_only(items: list[dict]) -> dict:
    """Returns the one item."""
    return items[0]
