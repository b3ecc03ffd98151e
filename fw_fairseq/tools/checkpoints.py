"""Loads models for the commands that read a checkpoint."""

from __future__ import annotations

from pathlib import Path

from .. import Mistake


def load_language_model(checkpoint, data, command: str, architectures: tuple[str, ...]):
    """Returns a model of one of the ``architectures`` in evaluation mode, and its dictionary. ``data``: the folder of dict.txt,
    where it has moved since the training."""
    from fairseq import checkpoint_utils
    from fairseq.models import MODEL_REGISTRY

    from .. import models  # noqa: F401

    if not Path(checkpoint).is_file():
        raise Mistake(f"CHECKPOINT {checkpoint} is not a file; name one that fairseq-train or fw-convert wrote")
    overrides = {} if data is None else {"data": str(data)}
    try:
        [model], _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], arg_overrides=overrides)
    except FileNotFoundError as error:
        raise Mistake(f"there is no dictionary at {error.filename}; name the folder of dict.txt by --data") from error
    if not isinstance(model, tuple(MODEL_REGISTRY[name] for name in architectures)):
        raise Mistake(f"CHECKPOINT {checkpoint} holds a {type(model).__name__}; {command} takes {' and '.join(architectures)}")
    return model.eval(), task.source_dictionary
