"""Saving and resuming

A file is written whole or not at all, a run resumes with the layers and the averages of its checkpoint, and no second run writes
into its directory.
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
from fairseq.trainer import Trainer
from omegaconf import DictConfig, open_dict

from ...errors import Mistake
from ..replacing import replaces

logger = logging.getLogger(__name__)
held: dict[tuple[int, str], IO] = {}  # locks, by the process, as a process that is started as a copy of this one does not have them


@replaces(PathManager, "copy")
def copy_by_renaming(original: Callable, source: str, target: str, overwrite: bool = False) -> bool:
    """A kill while fairseq copies a checkpoint onto `checkpoint_last.pt` leaves half of a file. Now the copy is written beside it
    and renamed. As in fairseq, an existing file stays only without `overwrite` and with iopath."""
    if PathManager.path_requires_pathmanager(source) or PathManager.path_requires_pathmanager(target):
        return original(source, target, overwrite)
    if file_io.IOPathManager and os.path.exists(target) and not overwrite:
        return False
    shutil.copyfile(source, f"{target}.tmp")
    os.replace(f"{target}.tmp", target)
    return True


@replaces(checkpoint_utils, "save_checkpoint")
def collect_states_of_all_workers(original: Callable, cfg: Any, trainer: Trainer, epoch_itr: Any, val_loss: float | None) -> Any:
    """fairseq asks only the worker that writes the checkpoint for the position in the data. Now the states that this project's
    tasks keep are collected from every worker first."""
    if hasattr(epoch_itr, "collect"):
        epoch_itr.collect()
    return original(cfg, trainer, epoch_itr, val_loss)


@replaces(checkpoint_utils, "verify_checkpoint_directory")
def lock_the_save_directory(original: Callable, save_dir: str) -> None:
    """Two runs with one `--save-dir` overwrite each other's checkpoints. Now the second one is refused. The lock ends with the
    process, however that ends; all workers of one run share it."""
    original(save_dir)
    if not PathManager.path_requires_pathmanager(save_dir):
        lock(save_dir)


def lock(folder: str) -> None:
    """Takes the lock of a save directory for this process, or refuses the directory if another process has it. The system holds the
    lock: it ends when the process does, however that happens, and no process that this one starts has it. The file stays."""
    path = os.path.realpath(os.path.join(folder, ".lock"))
    if (os.getpid(), path) in held:
        return
    try:
        file = open(path, "a+")  # noqa: SIM115
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
    """Gives up all locks of this process."""
    for key in [key for key in held if key[0] == os.getpid()]:
        held.pop(key).close()


@replaces(checkpoint_utils, "prune_state_dict")
def prune_once(original: Callable, state_dict: dict, model_cfg: Any) -> dict:
    """fairseq prunes by `--decoder-layers-to-keep` whenever it reads a checkpoint, so that such a run cannot be resumed or
    evaluated, and a translation model loses the layers of its other side. Now a side is pruned if it has more layers than are
    kept."""
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
    """fairseq leaves the number of a decoder's format out of the averages of `--store-ema`, and drops the last norm of a decoder
    without it, so that averages with `--decoder-normalize-before` are of another model. Now they have both."""
    versions = {name: x for name, x in averages.model.state_dict().items() if "version" in name}
    original(averages, versions | state_dict, *args, **kwargs)
