"""Training

Errors are clear, a NaN is traced to its layer, and fairseq-eval-lm takes ensembles.
"""

from __future__ import annotations

import os

import fairseq.trainer
import torch
from fairseq import checkpoint_utils, models, utils
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer

from .. import Mistake
from .literals import naming
from .non_finite import FirstNonFinite
from .replacing import changes, replaces


class NotFinite(Mistake, FloatingPointError):
    """A loss or a gradient is NaN or infinite."""


@changes("fairseq.trainer.NanDetector")
def find_the_first_non_finite_tensor() -> None:
    """After a NaN, fairseq repeats the pass and logs every tensor of the model. Now the repeated pass finds the first tensor that
    is not finite."""
    fairseq.trainer.NanDetector = FirstNonFinite


@replaces(Trainer, "train_step")
def say_where_a_nan_came_from(original, trainer, *args, **kwargs):
    """fairseq ends a run whose loss or gradient is NaN or infinite with a traceback. Now one sentence names the layer, the gate or
    projection, the update, and the file with the parameters."""
    try:
        return original(trainer, *args, **kwargs)
    except NotFinite:
        raise  # of a repeated step within this one
    except FloatingPointError as error:
        where = "; ".join(getattr(error, "__notes__", ["the repeated pass did not show where"]))
        crash = f"{trainer.cfg.checkpoint.save_dir}/crash.pt"
        raise NotFinite(f"{error}; {where}, at update {trainer.get_num_updates() + 1}; {crash} has the parameters") from None


@replaces(Trainer, "__init__")
def refuse_half_precision_without_gpu(original, trainer, cfg, *args, **kwargs) -> None:
    """With `--fp16` or `--bf16` and no GPU, fairseq fails in the middle of its work, or looks for a TPU. Now the option is refused
    before the run starts."""
    halves = ("memory_efficient_fp16", "memory_efficient_bf16", "fp16", "bf16")
    given = next((name for name in halves if getattr(cfg.common, name)), None)
    tpu = cfg.common.tpu and utils.xm is not None
    if given and not tpu and (cfg.common.cpu or not torch.cuda.is_available()):
        raise Mistake(f"--{given.replace('_', '-')} trains on GPUs only; leave it out, or use --amp")
    original(trainer, cfg, *args, **kwargs)


@replaces(Trainer, "load_checkpoint")
def say_which_parameters_do_not_fit(original, trainer, filename, *args, **kwargs):
    """fairseq replaces the message about parameters that do not fit by "please ensure that the architectures match". Now the
    message names them."""
    try:
        return original(trainer, filename, *args, **kwargs)
    except Exception as error:
        if type(error) is Exception and isinstance(error.__context__, ValueError):
            raise Mistake(f"{filename}: {error.__context__}") from error
        raise


@replaces(checkpoint_utils, "load_model_ensemble_and_task")
def split_ensembles(original, filenames, *args, **kwargs):
    """`fairseq-eval-lm` takes `--path a.pt:b.pt` for one file, unlike fairseq's other tools. Now it is an ensemble everywhere."""
    split = [part for name in filenames for part in ([name] if os.path.exists(name) else utils.split_paths(name))]
    return original(split, *args, **kwargs)


@replaces(models, "build_model")
def name_options_that_are_no_literals(original, cfg, *args, **kwargs):
    """fairseq runs some option strings as Python when it builds a model. Now they must be Python literals, and one that is not is
    refused by the name of its option."""
    with naming(cfg):
        return original(cfg, *args, **kwargs)


@replaces(FairseqTask, "build_model")
def refuse_options_without_effect(original, task, cfg, from_checkpoint=False, **kwargs):
    """fairseq takes every option, whether the model reads it or not. Now a new model of this project refuses an option that no part
    of it reads."""
    model = original(task, cfg, from_checkpoint=from_checkpoint, **kwargs)
    if not from_checkpoint and hasattr(model, "refuse_without_effect"):
        model.refuse_without_effect(cfg)
    return model
