"""Values that are not finite

A run that ends in NaN says so in one sentence, and no result is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer
from torch import nn

from ..errors import Mistake
from .replacing import replaces


class NotFinite(Mistake, FloatingPointError):
    """A loss, a gradient or a score is NaN or infinite."""

    exit_code = 3


@replaces(Trainer, "train_step")
def say_where_a_nan_came_from(original: Callable, trainer: Trainer, *args, **kwargs) -> Any:
    """A loss or gradient that is NaN or infinite ends a run with a traceback. Now one sentence names the update, the first
    parameter that is not finite, and the file with the parameters; the log names the first such output."""
    try:
        return original(trainer, *args, **kwargs)
    except NotFinite:
        raise  # of a repeated step within this one
    except FloatingPointError as error:
        place = f"at update {trainer.get_num_updates() + 1}; {trainer.cfg.checkpoint.save_dir}/crash.pt has the parameters"
        raise NotFinite(f"{error}; {why_not_finite(trainer.model)}, {place}") from None


@replaces(SequenceScorer, "generate")
def refuse_scores_that_are_nan(original: Callable, scorer: SequenceScorer, models: list, sample: dict, **kwargs) -> list:
    """`fairseq-eval-lm` and `--score-reference` report NaN as a result, with exit code 0. Now one sentence names the first
    parameter that is not finite, and the exit code is 3."""
    found = original(scorer, models, sample, **kwargs)
    if any(bool(hypothesis["positional_scores"].isnan().any()) for hypotheses in found for hypothesis in hypotheses):
        raise NotFinite(f"the model's scores are NaN; {why_not_finite(*models)}")
    return found


@replaces(FairseqTask, "valid_step")
def refuse_losses_that_are_nan(
    original: Callable, task: FairseqTask, sample: dict, model: nn.Module, criterion: nn.Module, **kwargs
) -> tuple:
    """`fairseq-validate` reports NaN as a result. Now it ends as above. A training continues after a validation whose loss is NaN,
    as before."""
    found = original(task, sample, model, criterion, **kwargs)
    if not getattr(task, "has_trainer", False) and bool(torch.as_tensor(found[0]).isnan().any()):
        raise NotFinite(f"the loss is NaN; {why_not_finite(model)}")
    return found


def why_not_finite(*models: nn.Module) -> str:
    """Returns which parameter is the first that is not finite, in words."""
    weights = ((name, x) for model in models for name, x in model.named_parameters())
    weight = next((name for name, x in weights if not x.isfinite().all()), None)
    return "all parameters are finite" if weight is None else f"the parameter {weight} is not finite"
