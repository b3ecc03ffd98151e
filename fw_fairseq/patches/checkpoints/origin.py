"""Where checkpoints come from

A checkpoint is used with the dictionaries that its model was trained with, and a run resumes with its task.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Callable

from fairseq.data import Dictionary
from fairseq.trainer import Trainer
from fairseq.utils import safe_getattr

from ...errors import Mistake
from ..replacing import replaces
from .reading import ORIGIN, origins
from .saving import DUE, PATIENCE, patience_of

logger = logging.getLogger(__name__)
SIDES = ("source", "target")


@replaces(Trainer, "state_dict")
def keep_task_and_dictionaries(original: Callable, trainer: Trainer) -> dict:
    """fairseq's checkpoints do not say what was in the data folder. Now they have a sum of each dictionary, the name of the task,
    the count of `--patience`, and whether a validation is due. A number that some of fairseq's modules save and never set is now 0,
    so equal runs have equal checkpoints."""
    state = original(trainer)
    for name, x in state.get("model", {}).items():
        if name.endswith("_float_tensor"):
            x.zero_()
    if counted := patience_of(trainer):
        state["extra_state"][PATIENCE] = counted
    if (due := getattr(trainer, "validation_due", None)) is not None:
        state["extra_state"][DUE] = due
    state["extra_state"][ORIGIN] = {"task": task_name(trainer), "dictionaries": dictionary_sums(trainer.task)}
    return state


def check_origin(trainer: Trainer, filename: str, extra_state: dict | None, reset_optimizer: bool) -> None:
    """Refuses to go on with another task in the middle of an epoch, or with another dictionary. A new run, which reads the text
    from its start with a new optimizer, may have another dictionary, and the log says so."""
    if extra_state is None:
        return
    options = trainer.cfg.checkpoint
    from_its_start = options.reset_dataloader or filename == safe_getattr(options, "finetune_from_model", None)
    origin, position = extra_state.get(ORIGIN), extra_state.get("train_iterator", {})
    if origin is None:
        logger.info("%s does not say its task and dictionaries; whether they are those of this run is not checked", filename)
        saved = "stateful_language_modeling" if "carried" in position else task_name(trainer)
        origin = {"task": saved, "dictionaries": {}}
    if position.get("iterations_in_epoch", 0) > 0 and not from_its_start and origin["task"] != task_name(trainer):
        raise Mistake(
            f"--task is {task_name(trainer)}, but {filename} stopped within an epoch of {origin['task']}; resume with that task, or"
            " read the text from its start with --reset-dataloader"
        )
    if not (said := another_dictionary(trainer.task, filename, origin)):
        return
    if not (from_its_start and reset_optimizer):
        raise Mistake(f"{said}; resume with the data of that run, or begin a new one with --finetune-from-model")
    logger.warning("%s; the new run begins with that one's embeddings for its own words", said)


def check_the_last_one(task: object) -> None:
    """Refuses to build the model of the checkpoint that was read last for a task with another dictionary."""
    for filename, origin in origins.items():
        if said := another_dictionary(task, filename, origin):
            raise Mistake(f"{said}; give the data that its model was trained with")


def another_dictionary(task: object, filename: str, origin: dict | None) -> str | None:
    """Returns words that name a dictionary of the task which is not that of the checkpoint, of those that both have."""
    now, before = dictionary_sums(task), (origin or {}).get("dictionaries", {})
    side = next((side for side in SIDES if side in now and before.get(side, now[side]) != now[side]), None)
    return side and f"the {side} dictionary of the data has other words, or another order, than that of {filename}"


def task_name(trainer: Trainer) -> str:
    """Returns the name of a run's task."""
    task = trainer.cfg.task
    return str(getattr(task, "_name", None) or getattr(task, "task", None) or type(trainer.task).__name__)


def dictionary_sums(task: object) -> dict[str, str]:
    """Returns a sum of the words, in their order, of each dictionary that the task has."""
    found = {}
    for side in SIDES:
        dictionary = None
        with contextlib.suppress(Exception):  # tasks of other projects may have none, or one for each language
            dictionary = getattr(task, f"{side}_dictionary")
        if isinstance(dictionary, Dictionary):
            found[side] = symbols_sum(dictionary.symbols)
    return found


def symbols_sum(symbols: list[str]) -> str:
    """Returns a sum of words in their order."""
    return hashlib.sha256("\n".join(symbols).encode()).hexdigest()
