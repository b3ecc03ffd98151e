"""Loads models for the commands that read a checkpoint."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from ..errors import Mistake
from ..files import building


def import_user_dir(folder: Path) -> None:
    """Imports a user directory as fairseq's commands do, so that a checkpoint may have parts that it registers."""
    from fairseq import utils

    next(folder.iterdir(), None)  # the error of a folder that is not there
    with building(f"--user-dir {folder} cannot be imported"):
        utils.import_user_module(Namespace(user_dir=str(folder)))


def load_language_model(checkpoint: str | Path, data: str | Path | None, command: str, architectures: tuple[str, ...]) -> tuple:
    """Returns a language model of one of the ``architectures`` in evaluation mode, its dictionary, and the number of the symbol
    that its texts begin with. ``data``: the folder of dict.txt, where it has moved since the training."""
    model, task = load_model(checkpoint, data, command, architectures)
    return model, task.source_dictionary, first_symbol(task)


def load_model(checkpoint: str | Path, data: str | Path | None, command: str, architectures: tuple[str, ...]) -> tuple[Any, Any]:
    """Returns a model of one of the ``architectures`` in evaluation mode, and its task. ``data``: the folder of its dictionaries,
    where it has moved since the training."""
    from fairseq import checkpoint_utils
    from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY

    from .. import models  # noqa: F401
    from ..patches.checkpoints.reading import model_options

    if not Path(checkpoint).is_file():
        raise Mistake(f"CHECKPOINT {checkpoint} is not a file; name one that fairseq-train or fw-convert wrote")
    kind: Any
    name: Any
    kinds = tuple(MODEL_REGISTRY[name] for name in architectures)
    overrides = {} if data is None else {"data": str(data)}
    try:
        with building(f"CHECKPOINT {checkpoint} has options or a dictionary that do not make the model of its parameters"):
            [model], _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], arg_overrides=overrides)
        kind, name = type(model), type(model).__name__
    except FileNotFoundError as error:
        options = model_options.get(str(checkpoint), {})  # of the checkpoint that was read last
        name = options.get("_name") or options.get("arch")
        kind = ARCH_MODEL_REGISTRY.get(name)
        if kind is None or kind in kinds:
            raise Mistake(f"there is no dictionary at {error.filename}; name its folder by --data") from error
    if not issubclass(kind, kinds):
        raise Mistake(f"CHECKPOINT {checkpoint} holds a {name}; {command} takes {' and '.join(architectures)}")
    return model.eval(), task


def first_symbol(task: Any) -> int:
    """Returns the number of the symbol that fairseq begins the texts of a language model with: <s> after --add-bos-token, else the
    end of sentence."""
    words = task.source_dictionary
    return words.bos() if getattr(getattr(task, "args", None), "add_bos_token", False) else words.eos()
