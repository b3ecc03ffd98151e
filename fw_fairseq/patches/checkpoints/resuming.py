"""Resuming

A run resumes with the task and the dictionaries that it began with, and no second run writes into its directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
from collections.abc import Iterator

from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.file_io import PathManager
from fairseq.models.ema.ema import EMA
from fairseq.trainer import Trainer
from omegaconf import DictConfig, open_dict

from ... import Mistake
from ..replacing import replaces
from .lock import lock
from .plateau import PATIENCE, patience_of

logger = logging.getLogger(__name__)
ORIGIN = "origin"  # an entry of a checkpoint's extra_state
SIDES = ("source", "target")


@replaces(checkpoint_utils, "verify_checkpoint_directory")
def lock_the_save_directory(original, save_dir) -> None:
    """Two runs with one `--save-dir` overwrite each other's checkpoints. Now the second one is refused. The lock ends with the
    process, so a run that was killed can be started again at once; all workers of one run share it."""
    original(save_dir)
    if not PathManager.path_requires_pathmanager(save_dir):
        lock(save_dir)


@replaces(Trainer, "state_dict")
def keep_task_and_dictionaries(original, trainer) -> dict:
    """fairseq's checkpoints name the data folder, but not what was in it. Now they also have a sum of each dictionary, the name of
    the task, and what `--patience` has counted."""
    state = original(trainer)
    if counted := patience_of(trainer):
        state["extra_state"][PATIENCE] = counted
    state["extra_state"][ORIGIN] = {"task": task_name(trainer), "dictionaries": dictionary_sums(trainer.task)}
    return state


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


def check_origin(trainer: Trainer, filename: str, extra_state: dict | None, fresh: bool) -> None:
    """Refuses to resume with another task in the middle of an epoch, or with another dictionary. ``fresh``: a new run begins with
    the parameters of the checkpoint, and its options may differ."""
    if extra_state is None or fresh:
        return
    origin, position = extra_state.get(ORIGIN), extra_state.get("train_iterator", {})
    within = position.get("iterations_in_epoch", 0) > 0 and not trainer.cfg.checkpoint.reset_dataloader
    if origin is None:
        logger.info("%s does not say its task and dictionaries; whether they are those of this run is not checked", filename)
        saved = "stateful_language_modeling" if "carried" in position else task_name(trainer)
        origin = {"task": saved, "dictionaries": {}}
    if within and origin["task"] != task_name(trainer):
        raise Mistake(
            f"--task is {task_name(trainer)}, but {filename} stopped within an epoch of {origin['task']}; resume with that task, or"
            " read the text from its start with --reset-dataloader"
        )
    now = dictionary_sums(trainer.task)
    for side in SIDES:
        if origin["dictionaries"].get(side, now.get(side)) != now.get(side):
            raise Mistake(
                f"the {side} dictionary of the data has other words, or another order, than that of {filename}; resume with the"
                " data of that run, or begin a new one with --finetune-from-model"
            )


def task_name(trainer: Trainer) -> str:
    task = trainer.cfg.task
    return str(getattr(task, "_name", None) or getattr(task, "task", None) or type(trainer.task).__name__)


def dictionary_sums(task) -> dict[str, str]:
    """Returns a sum of the words, in their order, of each dictionary that the task has."""
    found = {}
    for side in SIDES:
        dictionary = None
        with contextlib.suppress(Exception):  # tasks of other projects may have none, or one for each language
            dictionary = getattr(task, f"{side}_dictionary")
        if isinstance(dictionary, Dictionary):
            found[side] = hashlib.sha256("\n".join(dictionary.symbols).encode()).hexdigest()
    return found
