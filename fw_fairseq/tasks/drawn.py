"""Tasks that draw their data: no files. An epoch is --updates-per-epoch batches of --batch-size sequences."""

from dataclasses import dataclass
from typing import Any, Optional

import torch
from fairseq.data import Dictionary, FairseqDataset
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import FairseqTask
from omegaconf import II
from torch import Tensor

from ..config import check_options, option, option_name
from ..data.loading import BatchIterator
from ..errors import Mistake

SEED_OF = {"train": 0, "valid": 1, "test": 2}
# fairseq's options that drawn batches do not obey. fairseq fills --batch-size-valid in, so that nobody may have given it
WITHOUT_EFFECT = "max_tokens", "max_tokens_valid", "skip_remainder_batch", "curriculum", "add_bos_token"


@dataclass
class DrawnConfig(FairseqDataclass):
    """The options of every task that draws its data."""

    updates_per_epoch: int = option(100, "updates between two validations", least=1)
    batch_size: Optional[int] = II("dataset.batch_size")
    max_tokens: Optional[int] = II("dataset.max_tokens")
    max_tokens_valid: Optional[int] = II("dataset.max_tokens_valid")
    skip_remainder_batch: Any = II("optimization.skip_remainder_batch")  # a bool would be True where no command line has it
    curriculum: int = II("dataset.curriculum")
    seed: int = II("common.seed")


class DrawnBatches(FairseqDataset):
    """Item i of an epoch is its i-th batch, always the same one: ``task.draw(split, generator)``."""

    def __init__(self, task: "DrawnTask", split: str) -> None:
        self.task, self.cfg, self.split, self.epoch = task, task.cfg, split, 1

    def __len__(self) -> int:
        return self.cfg.updates_per_epoch if self.split == "train" else 1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> dict:
        generator = torch.Generator()
        draw = (self.epoch - 1) * len(self) + int(index) if self.split == "train" else 0
        generator.manual_seed((self.cfg.seed * 3 + SEED_OF[self.split]) * 10**9 + draw)
        return self.task.draw(self.split, generator)

    def collater(self, samples: list[dict]) -> dict:
        return samples[0] if samples else {}


class DrawnTask(FairseqTask):
    """A task names itself and its config, and draws a batch."""

    name: str
    config: type[DrawnConfig]

    def __init__(self, cfg: Any, **unused) -> None:
        check_options(cfg, self.config)
        if not cfg.batch_size:
            raise Mistake(f"{self.name} needs --batch-size, the sequences of a mini-batch")
        for name in WITHOUT_EFFECT:
            value = getattr(cfg, name, None)
            if type(value) in (int, bool) and value:  # else it names another group, which is not there in Python
                raise Mistake(f"{option_name(name)} has no effect on sequences that {self.name} draws; leave it out")
        super().__init__(cfg)

    def draw(self, split: str, generator: torch.Generator) -> dict:
        """Returns a batch as fairseq's criterions take it."""
        raise NotImplementedError

    def load_dataset(self, split: str, **unused) -> None:
        if split not in SEED_OF:
            raise Mistake(f"{self.name} has no split {split!r}; it has: {', '.join(SEED_OF)}")
        self.datasets[split] = DrawnBatches(self, split)

    def get_batch_iterator(
        self, dataset: DrawnBatches, epoch: int = 1, num_shards: int = 1, shard_id: int = 0, num_workers: int = 0, **unused
    ) -> BatchIterator:
        dataset.set_epoch(epoch)
        batches = [[index] for index in range(len(dataset))]
        place = dict(num_shards=num_shards, shard_id=shard_id, num_workers=num_workers, epoch=epoch, seed=self.cfg.seed)
        return BatchIterator(dataset, collate_fn=dataset.collater, batch_sampler=batches, **place)

    def max_positions(self) -> None:
        return None

    @property
    def source_dictionary(self) -> Optional[Dictionary]:
        return None

    @property
    def target_dictionary(self) -> Optional[Dictionary]:
        return self.source_dictionary


@dataclass
class DrawnTextConfig(DrawnConfig):
    """The options of every task whose sequences are for language models."""

    evaluation_sequences: int = option(64, "sequences that a validation scores", least=1)
    tokens_per_sample: int = 1024  # this and the next two are read by fairseq's language models
    add_bos_token: bool = False
    max_target_positions: Optional[int] = None


class DrawnText(DrawnTask):
    """Sequences for language models, of which some tokens are scored. ``words`` says how many symbols there are."""

    def __init__(self, cfg: Any, **unused) -> None:
        super().__init__(cfg)
        self.dictionary = Dictionary()
        for number in range(self.words()):
            self.dictionary.add_symbol(str(number))

    def words(self) -> int:
        raise NotImplementedError

    def count(self, split: str) -> int:
        """The sequences of a batch."""
        return self.cfg.batch_size if split == "train" else self.cfg.evaluation_sequences

    def sample(self, source: Tensor, target: Tensor) -> dict:
        """The batch of source and target (B,T), numbers of symbols; a target of -1 is not scored."""
        first, pad = self.dictionary.nspecial, self.dictionary.pad()
        count, tokens = source.shape
        return {
            "id": torch.arange(count),
            "nsentences": count,
            "ntokens": int(target.ge(0).sum()),
            "net_input": {"src_tokens": source + first, "src_lengths": torch.full((count,), tokens)},
            "target": torch.where(target < 0, pad, target + first),
        }

    @property
    def source_dictionary(self) -> Dictionary:
        return self.dictionary
