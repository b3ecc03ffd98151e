"""associative_retrieval: pairs of a key and a value, then a key: which value was its last? (Schlag et al. 2021, sec. 6.1)"""

from dataclasses import dataclass
from typing import Optional

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.tasks import register_task
from torch import Tensor

from ..config import option
from ..errors import Mistake
from .drawn import DrawnConfig, DrawnTask

VALIDATION_SEQUENCES = 20


@dataclass
class AssociativeRetrievalConfig(DrawnConfig):
    """The options of --task associative_retrieval."""

    symbols: int = option(20, "S, the number of keys, and of values", least=2)
    setting: ChoiceEnum(["1", "2"]) = option(  # type: ignore[valid-type]
        "1", "1: S pairs without replacement; 2: 2S pairs with replacement, the last one counts"
    )
    evaluation_pairs: int = option(0, "pairs of a sequence in the evaluation of setting 2; 0: S, as in Schlag et al. 2021", least=0)


def draw_pairs(count: int, keys: int, pairs: Optional[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Keys and values, (B,T) each: so many pairs with replacement, or None, every key and value once."""

    def drawn() -> Tensor:
        if pairs is None:
            return torch.rand(count, keys, generator=generator).argsort(1)
        return torch.randint(keys, (count, pairs), generator=generator)

    return drawn(), drawn()


def last_values(keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
    """(B,Q): the value of each query's last occurrence, -1 where it does not occur."""
    steps = torch.arange(1, keys.shape[1] + 1)
    last = ((keys[:, None] == queries[:, :, None]) * steps).amax(-1)
    return values.gather(1, (last - 1).clamp(min=0)).masked_fill(last == 0, -1)


@register_task("associative_retrieval", dataclass=AssociativeRetrievalConfig)
class AssociativeRetrievalTask(DrawnTask):
    """Training asks one query a sequence, validation all of them. It has no dictionary."""

    name, config = "associative_retrieval", AssociativeRetrievalConfig

    def __init__(self, cfg: AssociativeRetrievalConfig, **unused) -> None:
        super().__init__(cfg)
        if cfg.evaluation_pairs and str(cfg.setting) == "1":
            raise Mistake(f"--evaluation-pairs is {cfg.evaluation_pairs}; --setting 1 has every key once, leave it out")

    def draw(self, split: str, generator: torch.Generator) -> dict:
        """Keys, values and queries, (B,T) and (B,Q), and the last value of each query."""
        cfg, training = self.cfg, split == "train"
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
