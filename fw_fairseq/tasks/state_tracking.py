"""state_tracking: elements of a group one after the other, and their product so far (Grazzi et al. 2024; Siems et al. 2025)."""

import functools
import itertools
from dataclasses import dataclass

import torch
from fairseq.dataclass import ChoiceEnum
from fairseq.tasks import register_task
from torch import Tensor

from ..config import option
from ..errors import Mistake
from .drawn import DrawnText, DrawnTextConfig


@dataclass
class StateTrackingConfig(DrawnTextConfig):
    """The options of --task state_tracking."""

    group: ChoiceEnum(["parity", "modular", "s3", "s5"]) = option(  # type: ignore[valid-type]
        "parity", "parity: 0 and 1; modular: addition modulo --modulus; s3, s5: permutations of three or five things"
    )
    modulus: int = option(5, "number of elements of --group modular", least=2)
    length: int = option(128, "elements of a sequence in training", least=1)
    shortest_length: int = option(
        0,
        "elements of the shortest sequences in training; each batch draws its length, uniform in the logarithm; 0: all have "
        "--length",
        least=0,
    )
    evaluation_length: int = option(512, "elements of a sequence in validation; 0: as many as in training", least=0)


def products(group: str, modulus: int) -> Tensor:
    """(G,G): the number of each product; element 0 changes nothing."""
    if group in ("s3", "s5"):
        elements = list(itertools.permutations(range(int(group[1:]))))
        number = {element: i for i, element in enumerate(elements)}
        return torch.tensor([[number[tuple(a[i] for i in b)] for b in elements] for a in elements])
    numbers = torch.arange(2 if group == "parity" else modulus)
    return (numbers[:, None] + numbers) % len(numbers)


@register_task("state_tracking", dataclass=StateTrackingConfig)
class StateTrackingTask(DrawnText):
    """The word problem of a group. Length generalisation is what it tests: validation sequences are longer than training's."""

    name, config = "state_tracking", StateTrackingConfig

    def __init__(self, cfg: StateTrackingConfig, **unused) -> None:
        if cfg.shortest_length > cfg.length:
            raise Mistake(f"--shortest-length is {cfg.shortest_length}; it must be at most --length, {cfg.length}")
        super().__init__(cfg)

    @functools.cached_property
    def table(self) -> Tensor:
        """The number of each product of two elements."""
        return products(str(self.cfg.group), self.cfg.modulus)

    def words(self) -> int:
        return len(self.table)

    def training_length(self, generator: torch.Generator) -> int:
        """The elements of a batch's sequences: uniform in their logarithm, because a model learns the products of two or three
        elements first, and long sequences have few of those."""
        longest, shortest = self.cfg.length, self.cfg.shortest_length or self.cfg.length
        if shortest == longest:
            return longest
        return round(shortest * (longest / shortest) ** torch.rand((), generator=generator).item())

    def draw(self, split: str, generator: torch.Generator) -> dict:
        """Each token is a random element; its target is the product of all up to it."""
        cfg, count = self.cfg, self.count(split)
        length = self.training_length(generator) if split == "train" else cfg.evaluation_length or cfg.length
        source = torch.randint(len(self.table), (count, length), generator=generator)
        states = [source[:, 0]]
        for t in range(1, length):
            states.append(self.table[states[-1], source[:, t]])
        return self.sample(source, torch.stack(states, 1))
