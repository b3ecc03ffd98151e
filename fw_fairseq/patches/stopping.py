"""Stopping

A run whose machine is taken away saves what it has, and a complete one trains no further.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, cast

import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager
from fairseq.trainer import Trainer
from torch.multiprocessing import ProcessExitedException

from .checkpoints.saving import follows_validation, go_on_counting
from .replacing import changed, changes, replaces

logger = logging.getLogger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: run the same command again
PROGRAMS = ("fairseq_cli.train", "__main__", "__mp_main__")  # modules that may hold the code of fairseq-train
received: list[int] = []
listening: list[int] = []  # the process that listens


class Told(Exception):
    """Ends a validation because a signal has come."""


@changes("fairseq_cli.train.validate_and_save")
def save_when_told_to_stop() -> None:
    """A signal that stops a run loses everything since the last checkpoint. Now a training that gets SIGTERM or SIGUSR1 saves after
    the current update or validation batch, and ends with exit code 75. The same command resumes it, and begins with a validation
    that was due. A signal to one worker stops all of them."""
    change_program("validate_and_save", save_and_exit_if_told)


@changes("fairseq_cli.train.train")
def leave_complete_runs_alone() -> None:
    """A run that has reached `--max-update`, `--stop-time-hours` or `--patience` makes one more update each time it is started. Now
    it makes none."""
    change_program("train", train_unless_complete)


def change_program(name: str, function: Callable) -> None:
    """Changes a function of fairseq-train, in whichever module it is. Other programs have no validate_and_save."""
    for module in filter(None, map(sys.modules.get, PROGRAMS)):
        original = getattr(module, name, None)
        if hasattr(module, "validate_and_save") and original is not None and not hasattr(original, "changed_by"):
            setattr(module, name, changed(original, function))


def train_unless_complete(original: Callable, cfg: Any, trainer: Trainer, task: Any, epoch_itr: Any) -> tuple[list, bool]:
    """Trains for an epoch, unless the run that was resumed had reached its end."""
    counter = inspect.unwrap(original).__globals__["should_stop_early"]
    go_on_counting(counter, trainer)
    losses, stops = validate_first(inspect.unwrap(original).__globals__, cfg, trainer, task, epoch_itr)
    updates, patience = trainer.get_num_updates(), cfg.checkpoint.patience
    hours = trainer._previous_training_time / 3600  # all workers have read the same number from the checkpoint
    reached = limit_reached(cfg.optimization, updates, hours)
    if not reached and 0 < patience <= getattr(counter, "num_runs", 0):
        reached = f"--patience {patience}"
    if not reached and not stops:
        return original(cfg, trainer, task, epoch_itr)
    if reached:
        logger.info("the run was complete after %d updates, by %s, and trains no further", updates, reached)
    return losses, True


def validate_first(program: dict, cfg: Any, trainer: Trainer, task: Any, epoch_itr: Any) -> tuple[list, bool]:
    """Makes up for a validation that a signal has left out: the model is that of ``checkpoint_last.pt``, which becomes the best one
    where it is. Returns its losses, and whether they end the run."""
    epoch, trainer.validation_due = getattr(trainer, "validation_due", None), None
    if epoch is None or cfg.dataset.disable_validation:
        return [None], False
    losses, saving = program["validate"](cfg, trainer, task, epoch_itr, cfg.dataset.valid_subset.split(",")), cfg.checkpoint
    best = getattr(checkpoint_utils.save_checkpoint, "best", losses[0])
    if losses[0] == (max if saving.maximize_best_checkpoint_metric else min)(losses[0], best):
        checkpoint_utils.save_checkpoint.best = losses[0]
        if trainer.should_save_checkpoint_on_current_rank and not saving.no_save:
            last, first = (
                os.path.join(saving.save_dir, f"checkpoint_{name}{trainer.checkpoint_suffix}.pt") for name in ("last", "best")
            )
            PathManager.copy(last, first, overwrite=True)
    if epoch and follows_validation(trainer.lr_scheduler):
        trainer.lr_step(epoch, losses[0])
    return losses, program["should_stop_early"](cfg, losses[0])


def limit_reached(limits: Any, updates: int, hours: float) -> str | None:
    """Returns the option whose limit a run of so many updates and hours has reached, with its value."""
    if 0 < limits.max_update <= updates:
        return f"--max-update {limits.max_update}"
    return f"--stop-time-hours {limits.stop_time_hours:g}" if 0 < limits.stop_time_hours < hours else None


def save_and_exit_if_told(
    original: Callable, cfg: Any, trainer: Trainer, task: Any, epoch_itr: Any, valid_subsets: list[str], end_of_epoch: bool
) -> tuple[list, bool]:
    """Does what fairseq does after each update, unless a signal has come, then or in a validation: then it saves and exits. The
    checkpoint says whether a validation is due, and at the end of which epoch."""
    listen()
    updates, hours = trainer.get_num_updates(), trainer.cumulative_training_time() / 3600
    intervals = cfg.checkpoint.save_interval_updates, cfg.dataset.validate_interval_updates
    due = end_of_epoch or any(interval > 0 and updates % interval == 0 for interval in intervals)
    if limit_reached(cfg.optimization, updates, hours) or not told(trainer.device):
        try:
            return original(cfg, trainer, task, epoch_itr, valid_subsets, end_of_epoch)
        except Told:
            due = True
    if due and not cfg.dataset.disable_validation:
        trainer.validation_due = epoch_itr.epoch if end_of_epoch else 0
    checkpoint_utils.save_checkpoint(cfg.checkpoint, trainer, epoch_itr, None)
    if cfg.checkpoint.write_checkpoints_asynchronously:
        PathManager.async_close()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # a worker that exits earlier makes the launcher end the one that is still writing
    kept = "without a checkpoint" if cfg.checkpoint.no_save or cfg.checkpoint.no_last_checkpoints else "with a checkpoint"
    names = " and ".join(signal.Signals(number).name for number in dict.fromkeys(received)) or "another worker's signal"
    logger.info("%s stopped the run after update %d, %s; exit code %d", names, updates, kept, EXIT_CODE)
    raise SystemExit(EXIT_CODE)


@replaces(Trainer, "valid_step")
def end_a_validation_when_told(original: Callable, trainer: Trainer, *args, **kwargs) -> Any:
    """A validation reads to its end after a signal. Now it ends at the next batch."""
    if listening == [os.getpid()] and told(trainer.device):
        raise Told
    return original(trainer, *args, **kwargs)


def told(device: torch.device) -> bool:
    """Whether this worker or another one has received a signal."""
    if not torch.distributed.is_initialized():
        return bool(received)
    flag = torch.tensor([float(len(received))], device=device)
    torch.distributed.all_reduce(flag)
    return bool(flag)


def started_from_outside() -> bool:
    """Whether another program, such as torchrun or mpirun, has started this worker and says in the environment which one it is."""
    return {"MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"} <= os.environ.keys()


@contextlib.contextmanager
def as_parent_of_workers(main: Callable, cfg: Any) -> Iterator[None]:
    """Within this block, a process of fairseq-train that starts a worker for each of its GPUs passes the signals on to them, and it
    ends with their exit code."""
    trains = "validate_and_save" in getattr(main, "__globals__", {})  # by whichever name fairseq-train was started
    starts = trains and cfg.distributed_training.distributed_world_size > 1 and torch.cuda.device_count() > 1
    if starts and not started_from_outside():
        handle(pass_on)
    try:
        yield
    except ProcessExitedException as error:
        if error.exit_code != EXIT_CODE:
            raise
        raise SystemExit(EXIT_CODE) from None
    finally:
        listen_no_more()


def pass_on(number: int, frame: FrameType | None) -> None:
    """Hands a signal on to the workers; without workers it ends the process."""
    children = multiprocessing.active_children()
    for child in children:
        os.kill(cast(int, child.pid), number)
    if not children:
        end_by(number)


def note(number: int, frame: FrameType | None) -> None:
    """Keeps a signal for the end of the update."""
    if os.getpid() == listening[0]:
        received.append(number)
        said = f"{signal.Signals(number).name} received: the run saves and stops after the update or the batch at hand\n"
        os.write(2, said.encode())  # a handler may not enter a stream that is being written
    else:  # a process that was forked from this one, such as one that loads data
        end_by(number)


def end_by(number: int) -> None:
    """Ends this process by a signal."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def listen() -> None:
    """Notes the signals from now on, in place of being ended by them."""
    listening[:] = [os.getpid()]
    handle(note)


def handle(function: Any) -> None:
    """Calls a function at the signals. Functions that the program itself has set for them stay."""
    for number in SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, note, pass_on):
            with contextlib.suppress(ValueError):  # only the main thread may
                signal.signal(number, function)


def listen_no_more() -> None:
    """Leaves the signals to the system again."""
    received.clear()
    listening.clear()
    handle(signal.SIG_DFL)
