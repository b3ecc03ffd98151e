"""until_solved: a constant learning rate until the validation loss is good enough, then 0, at which --stop-min-lr 0 ends a run."""

from dataclasses import dataclass, field
from typing import Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer
from fairseq.optim.lr_scheduler import FairseqLRScheduler, register_lr_scheduler
from omegaconf import II

from ..config import option
from ..errors import Mistake


@dataclass
class UntilSolvedConfig(FairseqDataclass):
    """The options of --lr-scheduler until_solved."""

    target_loss: float = option(0.001, "training ends when the validation loss falls below this; give --stop-min-lr 0 with it")
    lr: list[float] = field(default_factory=lambda: II("optimization.lr"))
    stop_min_lr: float = II("optimization.stop_min_lr")


@register_lr_scheduler("until_solved", dataclass=UntilSolvedConfig)
class UntilSolved(FairseqLRScheduler):
    """A constant learning rate that becomes 0 when the validation loss falls below --target-loss."""

    follows_validation = True

    def __init__(self, cfg: UntilSolvedConfig, optimizer: FairseqOptimizer) -> None:
        super().__init__(cfg, optimizer)
        if cfg.stop_min_lr < 0:
            raise Mistake("--lr-scheduler until_solved ends a run by a learning rate of 0: give --stop-min-lr 0")
        self.optimizer.set_lr(cfg.lr[0])

    def step(self, epoch: int, val_loss: Optional[float] = None) -> float:
        """Returns the learning rate after an epoch; it is 0 once ``val_loss`` is below the target."""
        super().step(epoch, val_loss)
        if val_loss is not None and val_loss < self.cfg.target_loss:
            self.optimizer.set_lr(0.0)
        return self.optimizer.get_lr()
