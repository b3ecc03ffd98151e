"""mqar: pairs of a key and a value, then the keys again in another order: the value of each (Arora et al. 2023)."""

from dataclasses import dataclass

import torch
from fairseq.tasks import register_task

from ..config import option
from ..errors import Mistake
from .drawn import DrawnText, DrawnTextConfig


@dataclass
class MqarConfig(DrawnTextConfig):
    """The options of --task mqar."""

    pairs: int = option(64, "pairs of a sequence, which are all asked for", least=1)
    evaluation_pairs: int = option(0, "pairs of a sequence in validation; 0: as many as in training", least=0)
    symbols: int = option(8192, "number of symbols: half of them are keys, half are values", least=2)


@register_task("mqar", dataclass=MqarConfig)
class MqarTask(DrawnText):
    """Multi-query associative recall. The keys of a sequence differ; values may repeat."""

    name, config = "mqar", MqarConfig

    def __init__(self, cfg: MqarConfig, **unused) -> None:
        super().__init__(cfg)
        pairs, keys = max(cfg.pairs, cfg.evaluation_pairs), cfg.symbols // 2
        if pairs > keys:
            raise Mistake(f"a sequence has {pairs} pairs, and --symbols {cfg.symbols} makes {keys} keys; use at most that many")

    def words(self) -> int:
        return self.cfg.symbols

    def draw(self, split: str, generator: torch.Generator) -> dict:
        """Keys have the first half of the numbers and values the second; the tokens are k_1 v_1 ... k_N v_N and the keys in random
        order, whose targets are their values."""
        cfg, count = self.cfg, self.count(split)
        pairs, half = cfg.pairs if split == "train" else cfg.evaluation_pairs or cfg.pairs, cfg.symbols // 2
        keys = torch.rand(count, half, generator=generator).argsort(1)[:, :pairs]
        values = torch.randint(half, half + half, (count, pairs), generator=generator)
        order = torch.rand(count, pairs, generator=generator).argsort(1)
        told = torch.stack([keys, values], 2).flatten(1)
        source = torch.cat([told, keys.gather(1, order)], 1)
        return self.sample(source, torch.cat([torch.full_like(told, -1), values.gather(1, order)], 1))
