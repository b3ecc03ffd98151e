"""associative_retrieval: pairs of a key and a value, then a key: which value was its last? (Schlag et al. 2021, sec. 6.1)"""

from dataclasses import dataclass
from typing import Optional

import torch
from fairseq.data import FairseqDataset
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.tasks import FairseqTask, register_task
from omegaconf import II
from torch import Tensor

from .. import Mistake
from ..config import check_numbers, option
from ..data.loading import BatchIterator

VALIDATION_SEQUENCES = 20
SEED_OF = {"train": 0, "valid": 1, "test": 2}


@dataclass
class AssociativeRetrievalConfig(FairseqDataclass):
    symbols: int = option(20, "S, the number of keys, and of values", least=2)
    setting: ChoiceEnum(["1", "2"]) = option(
        "1", "1: S pairs without replacement; 2: 2S pairs with replacement, the last one counts"
    )
    evaluation_pairs: int = option(
        0, "pairs of a sequence that setting 2 is evaluated with; 0: S, as Schlag et al. 2021 published it", least=0
    )
    updates_per_epoch: int = option(100, "updates between two validations", least=1)
    batch_size: Optional[int] = II("dataset.batch_size")  # noqa: UP045  omegaconf 2.0 does not know "int | None"
    seed: int = II("common.seed")


def draw_pairs(count: int, keys: int, pairs: int | None, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Keys and values, (B,T) each: so many pairs with replacement, or None, every key and value once."""
    if pairs is None:
        return tuple(torch.rand(count, keys, generator=generator).argsort(1) for _ in range(2))
    return tuple(torch.randint(keys, (count, pairs), generator=generator) for _ in range(2))


def last_values(keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
    """(B,Q): the value of each query's last occurrence, -1 where it does not occur."""
    steps = torch.arange(1, keys.shape[1] + 1)
    last = ((keys[:, None] == queries[:, :, None]) * steps).amax(-1)
    return values.gather(1, (last - 1).clamp(min=0)).masked_fill(last == 0, -1)


class Pairs(FairseqDataset):
    """Item i of an epoch is its i-th batch, always the same one. Training asks one query a sequence, validation all of them."""

    def __init__(self, cfg: AssociativeRetrievalConfig, split: str):
        self.cfg, self.split, self.epoch = cfg, split, 1

    def __len__(self) -> int:
        return self.cfg.updates_per_epoch if self.split == "train" else 1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> dict:
        cfg, training = self.cfg, self.split == "train"
        generator = torch.Generator()
        draw = (self.epoch - 1) * len(self) + int(index) if training else 0
        generator.manual_seed((cfg.seed * 3 + SEED_OF[self.split]) * 10**9 + draw)
        count = cfg.batch_size if training else VALIDATION_SEQUENCES
        pairs = None if str(cfg.setting) == "1" else 2 * cfg.symbols if training else cfg.evaluation_pairs or cfg.symbols
        keys, values = draw_pairs(count, cfg.symbols, pairs, generator)
        if training:
            queries = keys.gather(1, torch.randint(keys.shape[1], (count, 1), generator=generator))
        else:
            queries = torch.arange(cfg.symbols).expand(count, -1)
        target = last_values(keys, values, queries)
        return {
            "id": torch.arange(count),
            "nsentences": count,
            "ntokens": int(target.ge(0).sum()),
            "net_input": {"keys": keys, "values": values, "queries": queries},
            "target": target,
        }

    def collater(self, samples: list[dict]) -> dict:
        return samples[0] if samples else {}


@register_task("associative_retrieval", dataclass=AssociativeRetrievalConfig)
class AssociativeRetrievalTask(FairseqTask):
    """Draws its data: no dictionary, no files. An epoch is --updates-per-epoch batches of --batch-size sequences."""

    def __init__(self, cfg: AssociativeRetrievalConfig, **unused):
        check_numbers(cfg, AssociativeRetrievalConfig)
        if not cfg.batch_size:
            raise Mistake("associative_retrieval needs --batch-size, the sequences of a mini-batch; the paper's is 32")
        if cfg.evaluation_pairs and str(cfg.setting) == "1":
            raise Mistake(f"--evaluation-pairs is {cfg.evaluation_pairs}; --setting 1 has every key once, leave it out")
        super().__init__(cfg)

    def load_dataset(self, split, combine=False, **kwargs):
        if split not in SEED_OF:
            raise Mistake(f"associative_retrieval has no split {split!r}; it has: {', '.join(SEED_OF)}")
        self.datasets[split] = Pairs(self.cfg, split)

    def get_batch_iterator(self, dataset, epoch=1, num_shards=1, shard_id=0, num_workers=0, **unused):
        dataset.set_epoch(epoch)
        return BatchIterator(
            dataset,
            collate_fn=dataset.collater,
            batch_sampler=[[index] for index in range(len(dataset))],
            seed=self.cfg.seed,
            num_shards=num_shards,
            shard_id=shard_id,
            num_workers=num_workers,
            epoch=epoch,
        )

    def max_positions(self):
        return None

    @property
    def source_dictionary(self):
        return None

    target_dictionary = source_dictionary
