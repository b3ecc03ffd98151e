"""Resuming

A run resumes with the layers and the averages of its checkpoint, and no second run writes into its directory.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator

from fairseq import checkpoint_utils
from fairseq.file_io import PathManager
from fairseq.models.ema.ema import EMA
from fairseq.trainer import Trainer
from omegaconf import DictConfig, open_dict

from ..replacing import replaces
from .lock import lock

logger = logging.getLogger(__name__)


@replaces(checkpoint_utils, "verify_checkpoint_directory")
def lock_the_save_directory(original, save_dir) -> None:
    """Two runs with one `--save-dir` overwrite each other's checkpoints. Now the second one is refused. The lock ends with the
    process, so a run that was killed can be started again at once; all workers of one run share it."""
    original(save_dir)
    if not PathManager.path_requires_pathmanager(save_dir):
        lock(save_dir)


@replaces(checkpoint_utils, "prune_state_dict")
def prune_once(original, state_dict: dict, model_cfg) -> dict:
    """fairseq prunes by `--decoder-layers-to-keep` whenever it reads a checkpoint, so that a run with this option cannot be resumed
    or evaluated; where one side of a translation model is pruned, it loses the layers of the other. Now a side is pruned if it has
    more layers than are kept, and the other side stays whole."""
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
def keep_versions(original, averages, state_dict: dict, *args, **kwargs) -> None:
    """fairseq leaves the number of a decoder's format out of the averages that `--store-ema` keeps, and drops the last norm of a
    decoder without it, so that averages with `--decoder-normalize-before` are of another model. Now they have both."""
    versions = {name: x for name, x in averages.model.state_dict().items() if "version" in name}
    original(averages, versions | state_dict, *args, **kwargs)


@contextlib.contextmanager
def with_averages(trainer: Trainer) -> Iterator[None]:
    """Within this block, a checkpoint without the averages that --store-ema keeps is read as one whose averages are its
    parameters. fairseq means to start from these, but has deleted them by then."""
    read = checkpoint_utils.load_checkpoint_to_cpu

    def read_with_averages(*args, **kwargs) -> dict:
        state = read(*args, **kwargs)
        if state.get("extra_state", {}).setdefault("ema", state["model"]) is state["model"]:
            logger.info("the averages of --store-ema start from the parameters of the checkpoint, which has none")
        return state

    if trainer.cfg.ema.store_ema:
        checkpoint_utils.load_checkpoint_to_cpu = read_with_averages
    try:
        yield
    finally:
        checkpoint_utils.load_checkpoint_to_cpu = read
