"""Writing checkpoints

A file is written whole or not at all, and an error names the file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator

from fairseq import checkpoint_utils, file_io
from fairseq.file_io import PathManager
from fairseq.trainer import Trainer

from ...errors import Mistake
from ...files import CRASH, why
from ..replacing import replaces


class Unwritable(Mistake, OSError):
    """A file cannot be written."""


@replaces(PathManager, "copy")
def copy_by_renaming(original, source, target, overwrite=False) -> bool:
    """fairseq copies a checkpoint onto `checkpoint_last.pt`; a kill during the copy leaves half of a file there. Now the copy is
    written beside it and renamed. As in fairseq, an existing file stays only without `overwrite` and with iopath."""
    if PathManager.path_requires_pathmanager(source) or PathManager.path_requires_pathmanager(target):
        return original(source, target, overwrite)
    if file_io.IOPathManager and os.path.exists(target) and not overwrite:
        return False
    with named_if_not_written(target):
        shutil.copyfile(source, f"{target}.tmp")
    os.replace(f"{target}.tmp", target)
    return True


@replaces(checkpoint_utils, "torch_persistent_save")
def name_what_did_not_fit(original, obj, filename, *args, **kwargs):
    """When the disk is full, neither torch nor the system names the file, and the partial file stays. Now the error names it and
    the partial file is removed."""
    with named_if_not_written(filename):
        return original(obj, filename, *args, **kwargs)


@contextlib.contextmanager
def named_if_not_written(path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error):
            raise
        with contextlib.suppress(OSError):
            os.remove(f"{path}.tmp")
        raise Unwritable(f"{path} cannot be written ({why(error)})") from error


@replaces(Trainer, "save_checkpoint")
def keep_no_crash_of_a_mistake(original, trainer, filename, *args, **kwargs):
    """fairseq writes `crash.pt` after every error within an update, with `--no-save` too. Now a user's mistake in the first update,
    before which nothing has been trained, leaves no file."""
    mistake = isinstance(error := sys.exc_info()[1], Mistake) and not isinstance(error, FloatingPointError)
    if not (mistake and os.path.basename(filename) == CRASH and trainer.get_num_updates() == 0):
        original(trainer, filename, *args, **kwargs)


@replaces(checkpoint_utils, "save_checkpoint")
def collect_states_of_all_workers(original, cfg, trainer, epoch_itr, val_loss):
    """Only one worker writes the checkpoint, and fairseq asks only that one for the position in the data. The tasks of this project
    also keep states per worker; now they are collected from every worker first."""
    if hasattr(epoch_itr, "collect"):
        epoch_itr.collect()
    return original(cfg, trainer, epoch_itr, val_loss)
