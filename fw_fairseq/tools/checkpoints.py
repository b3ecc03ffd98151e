"""Loads models for the commands that read a checkpoint."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from ..errors import Mistake
from ..files import building


def import_user_dir(folder: Path) -> None:
    """Imports a user directory as fairseq's commands do, so that a checkpoint may have parts that it registers."""
    from fairseq import utils

    if not folder.is_dir():
        raise Mistake(f"--user-dir is {folder}, which is not a folder; name the one that the training had")
    with building(f"--user-dir {folder} cannot be imported"):
        utils.import_user_module(Namespace(user_dir=str(folder)))


def load_language_model(checkpoint, data, command: str, architectures: tuple[str, ...]):
    """Returns a language model of one of the ``architectures`` in evaluation mode, its dictionary, and the number of the symbol
    that its texts begin with. ``data``: the folder of dict.txt, where it has moved since the training."""
    model, task = load_model(checkpoint, data, command, architectures)
    return model, task.source_dictionary, first_symbol(task)


def load_model(checkpoint, data, command: str, architectures: tuple[str, ...]):
    """Returns a model of one of the ``architectures`` in evaluation mode, and its task. ``data``: the folder of its dictionaries,
    where it has moved since the training."""
    from fairseq import checkpoint_utils
    from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY

    from .. import models  # noqa: F401

    if not Path(checkpoint).is_file():
        raise Mistake(f"CHECKPOINT {checkpoint} is not a file; name one that fairseq-train or fw-convert wrote")
    kinds = tuple(MODEL_REGISTRY[name] for name in architectures)
    overrides = {} if data is None else {"data": str(data)}
    try:
        with building(f"CHECKPOINT {checkpoint} has options or a dictionary that do not make the model of its parameters"):
            [model], _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], arg_overrides=overrides)
    except FileNotFoundError as error:
        if (name := architecture(checkpoint)) in ARCH_MODEL_REGISTRY and ARCH_MODEL_REGISTRY[name] not in kinds:
            raise Mistake(f"CHECKPOINT {checkpoint} holds a {name}; {command} takes {' and '.join(architectures)}") from None
        raise Mistake(f"there is no dictionary at {error.filename}; name its folder by --data") from error
    if not isinstance(model, kinds):
        raise Mistake(f"CHECKPOINT {checkpoint} holds a {type(model).__name__}; {command} takes {' and '.join(architectures)}")
    return model.eval(), task


def first_symbol(task) -> int:
    """Returns the number of the symbol that fairseq begins the texts of a language model with: <s> after --add-bos-token, else the
    end of sentence."""
    words = task.source_dictionary
    return words.bos() if getattr(getattr(task, "args", None), "add_bos_token", False) else words.eos()


def architecture(checkpoint) -> str | None:
    """Returns the name of the model's architecture, from the options in the checkpoint, which was read last."""
    from ..patches.checkpoints.reading import model_options

    options = model_options.get(str(checkpoint), {})
    return options.get("_name") or options.get("arch")
