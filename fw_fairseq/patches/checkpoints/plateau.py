"""Runs that follow the validation loss

A run with `--lr-scheduler reduce_lr_on_plateau` or `until_solved`, or with `--patience`, resumes as it would have gone on without
the stop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fairseq import checkpoint_utils
from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule
from fairseq.trainer import Trainer

from ..replacing import replaces

BAD_EPOCHS = "num_bad_epochs"
PATIENCE = "patience"  # an entry of a checkpoint's extra_state
COUNTED = ("best", "num_runs")  # attributes of fairseq's should_stop_early


@replaces(ReduceLROnPlateauLRSchedule, "state_dict")
def keep_the_bad_epochs(original: Callable, scheduler: ReduceLROnPlateauLRSchedule) -> dict:
    """fairseq's checkpoints do not say how many epochs have passed without a better validation loss, so that `--lr-patience` counts
    from 0 after each stop. Now they do."""
    return {**original(scheduler), BAD_EPOCHS: scheduler.lr_scheduler.num_bad_epochs}


@replaces(ReduceLROnPlateauLRSchedule, "load_state_dict")
def load_the_bad_epochs(original: Callable, scheduler: ReduceLROnPlateauLRSchedule, state: dict) -> None:
    """Now the count is read too; in a checkpoint of fairseq itself it is missing, and begins at 0."""
    original(scheduler, state)
    scheduler.lr_scheduler.num_bad_epochs = state.get(BAD_EPOCHS, 0)


@replaces(checkpoint_utils, "load_checkpoint")
def judge_the_last_epoch(original: Callable, cfg: Any, trainer: Trainer, **passthrough_args) -> tuple:
    """A checkpoint is written before the scheduler sees the epoch's validation loss, so that a run which stops there forgets that
    loss. Now the scheduler sees it when the run resumes."""
    extra_state, epochs = original(cfg, trainer, **passthrough_args)
    scheduler = trainer.lr_scheduler
    follows = isinstance(scheduler, ReduceLROnPlateauLRSchedule) or getattr(scheduler, "follows_validation", False)
    if extra_state is not None and follows and not (cfg.reset_optimizer or cfg.reset_lr_scheduler):
        position, loss = extra_state["train_iterator"], extra_state.get("val_loss")
        between = position["iterations_in_epoch"] == 0 and epochs.next_epoch_idx == position["epoch"] > 1
        if between and loss is not None:
            trainer.lr_step(position["epoch"] - 1, loss)
    return extra_state, epochs


def go_on_counting(counter: Callable, trainer: Trainer) -> None:
    """Gives ``counter``, fairseq's should_stop_early, what it had counted when the checkpoint was written, once for each run."""
    read = getattr(trainer, "patience_read", None)
    if read is None:
        return
    for name in COUNTED:
        vars(counter).pop(name, None)
    vars(counter).update({name: read[name] for name in COUNTED if name in read})
    trainer.patience_read, trainer.patience_counter = None, counter


def patience_of(trainer: Trainer) -> dict:
    """Returns what a checkpoint is to know of the validations that `--patience` counts."""
    counter = getattr(trainer, "patience_counter", None)
    counted = {} if counter is None else vars(counter)
    return {name: counted[name] for name in COUNTED if name in counted}
