"""Learning rates that follow the validation loss

A run with `--lr-scheduler reduce_lr_on_plateau` resumes with the learning rate that it would have had without the stop.
"""

from __future__ import annotations

from fairseq import checkpoint_utils
from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule

from ..replacing import replaces

BAD_EPOCHS = "num_bad_epochs"


@replaces(ReduceLROnPlateauLRSchedule, "state_dict")
def keep_the_bad_epochs(original, scheduler) -> dict:
    """fairseq's checkpoints do not say how many epochs have passed without a better validation loss, so that `--lr-patience` counts
    from 0 after each stop. Now they do."""
    return {**original(scheduler), BAD_EPOCHS: scheduler.lr_scheduler.num_bad_epochs}


@replaces(ReduceLROnPlateauLRSchedule, "load_state_dict")
def load_the_bad_epochs(original, scheduler, state: dict) -> None:
    """Now the count is read from the checkpoint too; in a checkpoint of fairseq itself it is missing, and begins at 0."""
    original(scheduler, state)
    scheduler.lr_scheduler.num_bad_epochs = state.get(BAD_EPOCHS, 0)


@replaces(checkpoint_utils, "load_checkpoint")
def judge_the_last_epoch(original, cfg, trainer, **passthrough_args):
    """fairseq writes the checkpoint of an epoch before its scheduler sees the epoch's validation loss, so that a run which stopped
    between two epochs forgets that loss. Now the scheduler sees it when the run resumes."""
    extra_state, epochs = original(cfg, trainer, **passthrough_args)
    follows = isinstance(trainer.lr_scheduler, ReduceLROnPlateauLRSchedule) and not (cfg.reset_optimizer or cfg.reset_lr_scheduler)
    if extra_state is not None and follows:
        position, loss = extra_state["train_iterator"], extra_state.get("val_loss")
        between = position["iterations_in_epoch"] == 0 and epochs.next_epoch_idx == position["epoch"] > 1
        if between and loss is not None:
            trainer.lr_step(position["epoch"] - 1, loss)
    return extra_state, epochs
