"""--lr-scheduler until_solved: the learning rate is constant until the validation loss is small enough, then 0."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fairseq.optim.sgd import SGD

from fw_fairseq.tasks.until_solved import UntilSolved, UntilSolvedConfig


def test_the_rate_is_0_once_the_loss_is_below_the_target():
    default = UntilSolvedConfig.__dataclass_fields__["target_loss"].default
    optimizer = SGD(SimpleNamespace(lr=[1.0], momentum=0.0, weight_decay=0.0), [torch.nn.Parameter(torch.ones(1))])
    schedule = UntilSolved(SimpleNamespace(lr=[0.25], target_loss=default, stop_min_lr=0.0), optimizer)
    rates = [optimizer.get_lr(), *(schedule.step(epoch, loss) for epoch, loss in enumerate([None, 2.0, 0.001, 0.0009]))]
    assert rates == [0.25, 0.25, 0.25, 0.25, 0] and schedule.best == 0.0009
    with pytest.raises(ValueError, match=r" give --stop-min-lr 0$"):  # with -1 no rate ends a run
        UntilSolved(SimpleNamespace(lr=[0.25], target_loss=default, stop_min_lr=-1.0), optimizer)
    with pytest.raises(ValueError, match="FairseqOptimizer"):
        UntilSolved(SimpleNamespace(lr=[0.25]), object())
