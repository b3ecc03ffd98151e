"""Checkpoints are written whole or not at all, and an error names the file."""

from __future__ import annotations

import contextlib
import os
import shutil

from fairseq.file_io import PathManager

from ..files import why


def copy(original, source, target, overwrite=False):
    """checkpoint_last.pt is a copy, which a kill could leave half written; a rename is all or nothing."""
    if PathManager.path_requires_pathmanager(target):
        return original(source, target, overwrite)
    if os.path.exists(target) and not overwrite:
        return False
    with named_if_not_written(target):
        shutil.copyfile(source, f"{target}.tmp")
    os.replace(f"{target}.tmp", target)
    return True


def torch_persistent_save(original, obj, filename, *args, **kwargs):
    with named_if_not_written(filename):
        return original(obj, filename, *args, **kwargs)


@contextlib.contextmanager
def named_if_not_written(path):
    """Of a full disk the system and torch say neither what did not fit, nor do they take its first part away."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error):
            raise
        with contextlib.suppress(OSError):
            os.remove(f"{path}.tmp")
        raise OSError(f"{path} cannot be written ({why(error)})") from error


def save_checkpoint(original, cfg, trainer, epoch_itr, val_loss):
    """Every worker passes here, one writes: the moment to collect what each of them remembers."""
    if hasattr(epoch_itr, "collect"):
        epoch_itr.collect()
    return original(cfg, trainer, epoch_itr, val_loss)
