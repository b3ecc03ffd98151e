"""Saving and resuming

A file is written whole or not at all, no second run writes into a run's directory, and a run resumes with the layers and the
averages of its checkpoint. One that follows the validation loss resumes as it would have gone on without the stop.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import shutil
import socket
from collections.abc import Callable
from typing import IO, Any

from fairseq import checkpoint_utils, file_io
from fairseq.file_io import PathManager
from fairseq.models.ema.ema import EMA
from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule
from fairseq.trainer import Trainer
from omegaconf import DictConfig, open_dict

from ...errors import Mistake
from ..replacing import replaces

BAD_EPOCHS = "num_bad_epochs"
PATIENCE, DUE = "patience", "validation_due"  # entries of a checkpoint's extra_state
COUNTED = ("best", "num_runs")  # attributes of fairseq's should_stop_early
NUMBERED = re.compile(r"/checkpoint(\d+|_\d+_\d+)[^/]*$")
logger = logging.getLogger(__name__)
held: dict[tuple[int, str], IO] = {}  # locks, by the process, as a process that is started as a copy of this one does not have them


@replaces(PathManager, "copy")
def copy_by_renaming(original: Callable, source: str, target: str, overwrite: bool = False) -> bool:
    """A kill while fairseq copies a checkpoint onto `checkpoint_last.pt` leaves half of a file. Now the copy is written beside it
    and renamed. If the checkpoint has a number in its name, `checkpoint_last.pt` is a hard link to it."""
    if PathManager.path_requires_pathmanager(source) or PathManager.path_requires_pathmanager(target):
        return original(source, target, overwrite)
    if file_io.IOPathManager and os.path.exists(target) and not overwrite:
        return False
    part = f"{target}.tmp"
    with contextlib.suppress(FileNotFoundError):
        os.remove(part)
    try:
        if not (NUMBERED.search(source) and os.path.basename(target).startswith("checkpoint_last")):
            raise OSError
        os.link(source, part)
    except OSError:  # another kind of copy, or a disk without links
        shutil.copyfile(source, part)
    os.replace(part, target)  # which leaves part where both are one file already
    with contextlib.suppress(FileNotFoundError):
        os.remove(part)
    return True


@replaces(checkpoint_utils, "save_checkpoint")
def collect_states_of_all_workers(original: Callable, cfg: Any, trainer: Trainer, epoch_itr: Any, val_loss: float | None) -> Any:
    """Only the worker that writes a checkpoint gives its position in the data. Now the states of this project's tasks are collected
    from every worker first."""
    if hasattr(epoch_itr, "collect"):
        epoch_itr.collect()
    return original(cfg, trainer, epoch_itr, val_loss)


@replaces(checkpoint_utils, "verify_checkpoint_directory")
def lock_the_save_directory(original: Callable, save_dir: str) -> None:
    """Two runs with one `--save-dir` overwrite each other's checkpoints. Now the second one is refused. The lock ends with the
    process; all workers of one run share it."""
    original(save_dir)
    if not PathManager.path_requires_pathmanager(save_dir):
        lock(save_dir)


def lock(folder: str) -> None:
    """Takes the lock of a save directory for this process, or refuses the directory if another process has it. The system holds the
    lock: it ends when the process does, however that happens, and no process that this one starts has it."""
    path = os.path.realpath(os.path.join(folder, ".lock"))
    if (os.getpid(), path) in held:
        return
    try:
        file = open(path, "a+")  # noqa: SIM115
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not (os.path.exists(path) and os.path.samefile(file.fileno(), path)):
            lock(folder)  # another run ended meanwhile, and has removed the file that was opened
            return
    except BlockingIOError:
        file.seek(0)
        help_ = "give another --save-dir, or wait until that run has ended"
        raise Mistake(f"--save-dir is {folder}, where {file.read().strip() or 'another process'} is training; {help_}") from None
    except OSError as error:
        logger.warning("%s cannot be locked (%s); do not start a second run in %s", path, error.strerror, folder)
        return
    file.truncate(0)
    file.write(f"process {os.getpid()} of {socket.gethostname()}\n")
    file.flush()
    held[os.getpid(), path] = file


def release() -> None:
    """Gives up all locks of this process and removes their files."""
    for key in [key for key in held if key[0] == os.getpid()]:
        with contextlib.suppress(OSError), held.pop(key):
            os.remove(key[1])


@replaces(checkpoint_utils, "prune_state_dict")
def prune_once(original: Callable, state_dict: dict, model_cfg: Any) -> dict:
    """fairseq prunes by `--decoder-layers-to-keep` whenever it reads a checkpoint, so such a run cannot be resumed or evaluated,
    and a translation model loses layers of its other side. Now a side is pruned only if it has more layers than are kept."""
    kept = {side: value for side in ("encoder", "decoder") if (value := getattr(model_cfg, f"{side}_layers_to_keep", None))}
    pruned = tuple(side for side, value in kept.items() if layers_of(side, state_dict) > len(value.split(",")))
    if not pruned:
        return state_dict
    found = original({name: x for name, x in state_dict.items() if name.startswith(pruned)}, model_cfg)
    with open_dict(model_cfg) if isinstance(model_cfg, DictConfig) else contextlib.nullcontext():
        for side, value in kept.items():  # fairseq deletes them; the next checkpoint holds them, and the model as it is now
            setattr(model_cfg, f"{side}_layers_to_keep", value)
    return {name: x for name, x in state_dict.items() if not name.startswith(pruned)} | found


def layers_of(side: str, state_dict: dict) -> int:
    """Returns how many layers a side of a model has."""
    found = (re.match(rf"{side}.*?\.layers\.(\d+)\.", name) for name in state_dict)
    return len({match[1] for match in found if match})


@replaces(EMA, "restore")
def keep_versions(original: Callable, averages: EMA, state_dict: dict, *args, **kwargs) -> None:
    """Averages of `--store-ema` lack the number of a decoder's format, so fairseq drops the last norm of a decoder with
    `--decoder-normalize-before`. Now averages have the number and the norm."""
    versions = {name: x for name, x in averages.model.state_dict().items() if "version" in name}
    original(averages, versions | state_dict, *args, **kwargs)


@replaces(ReduceLROnPlateauLRSchedule, "state_dict")
def keep_the_bad_epochs(original: Callable, scheduler: ReduceLROnPlateauLRSchedule) -> dict:
    """fairseq's checkpoints lack the number of epochs without a better validation loss, so `--lr-patience` counts from 0 after each
    stop. Now they have it."""
    return {**original(scheduler), BAD_EPOCHS: scheduler.lr_scheduler.num_bad_epochs}


@replaces(ReduceLROnPlateauLRSchedule, "load_state_dict")
def load_the_bad_epochs(original: Callable, scheduler: ReduceLROnPlateauLRSchedule, state: dict) -> None:
    """Now that number is read too; without it, as in a checkpoint of fairseq itself, it begins at 0."""
    original(scheduler, state)
    scheduler.lr_scheduler.num_bad_epochs = state.get(BAD_EPOCHS, 0)


@replaces(checkpoint_utils, "load_checkpoint")
def judge_the_last_epoch(original: Callable, cfg: Any, trainer: Trainer, **passthrough_args) -> tuple:
    """A checkpoint is written before the scheduler sees the epoch's validation loss, so a run that stops there forgets it. Now the
    scheduler sees it when the run resumes."""
    extra_state, epochs = original(cfg, trainer, **passthrough_args)
    scheduler = trainer.lr_scheduler
    if extra_state is not None and follows_validation(scheduler) and not (cfg.reset_optimizer or cfg.reset_lr_scheduler):
        position, loss = extra_state["train_iterator"], extra_state.get("val_loss")
        between = position["iterations_in_epoch"] == 0 and epochs.next_epoch_idx == position["epoch"] > 1
        if between and loss is not None:
            trainer.lr_step(position["epoch"] - 1, loss)
    return extra_state, epochs


def follows_validation(scheduler: object) -> bool:
    """Whether the learning rate depends on the validation loss."""
    return isinstance(scheduler, ReduceLROnPlateauLRSchedule) or getattr(scheduler, "follows_validation", False)


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
