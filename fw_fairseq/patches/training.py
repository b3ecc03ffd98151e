"""Training and loading

A run goes on with what it began with, a model is what its options say, and fairseq-eval-lm takes ensembles.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from fairseq import checkpoint_utils, models, utils
from fairseq.logging import metrics
from fairseq.modules.quantization.scalar.utils import MAPPING as QUANTISED
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer
from fairseq.utils import safe_getattr
from torch import nn

from ..errors import Mistake
from .checkpoints.model_options import LAST, check_options, take_options_over
from .checkpoints.origin import check_origin, check_the_last_one
from .checkpoints.reading import ModelOverrides, add_options, newer_options
from .checkpoints.saving import DUE, PATIENCE
from .literals import as_dict, naming
from .options import TWO_PRECISIONS
from .replacing import replaces

HALVES = ("memory_efficient_bf16", "fp16", "bf16", "amp")


@replaces(Trainer, "__init__")
def refuse_half_precision_on_cpus(original: Callable, trainer: Trainer, cfg: Any, task: FairseqTask, *args, **kwargs) -> None:
    """Without a GPU, `--fp16` and `--bf16` fail late, and `--amp` does nothing. Now they are refused before the run starts.
    `--memory-efficient-fp16` trains on CPUs."""
    if cfg.common.fp16 and cfg.common.bf16:
        raise Mistake(TWO_PRECISIONS)
    given = next((name for name in HALVES if getattr(cfg.common, name)), None)
    works = cfg.common.memory_efficient_fp16 or (cfg.common.tpu and utils.xm is not None)
    if given and not works and (cfg.common.cpu or not torch.cuda.is_available()):
        raise Mistake(f"--{given.replace('_', '-')} is for GPUs; leave it out to train on CPUs")
    original(trainer, cfg, task, *args, **kwargs)
    task.has_trainer = True  # which fairseq-validate does without


@replaces(Trainer, "load_checkpoint")
def say_what_does_not_fit(
    original: Callable, trainer: Trainer, filename: str, reset_optimizer: bool = False, *args, **kwargs
) -> dict | None:
    """Now the message about parameters that do not fit names them. fairseq also resumes with another task, at a wrong place of the
    text, with another dictionary, and with options that make another model of the same parameters, such as another `--feature-map`.
    Now this is refused; with an explicit `--restore-file` the log names such options. If that file is missing, fairseq trains from
    scratch; now it is refused. The counts of `--patience` and of `wall` continue."""
    try:
        extra_state = original(trainer, filename, reset_optimizer, *args, **kwargs)
    except Exception as error:
        if type(error) is not Exception or not isinstance(error.__context__, ValueError):
            raise
        check_the_last_one(trainer.task)
        raise Mistake(f"{filename}: {error.__context__}") from error
    if extra_state is not None:
        check_options(trainer, filename)
    elif (given := safe_getattr(trainer.cfg.checkpoint, "restore_file", LAST)) != LAST:
        raise Mistake(f"--restore-file is {given}, where there is no file; name the checkpoint from which the run starts")
    check_origin(trainer, filename, extra_state, reset_optimizer)
    fresh = extra_state is None or reset_optimizer or kwargs.get("reset_meters", False)
    trainer.patience_read = {} if fresh else extra_state.get(PATIENCE, {})
    trainer.validation_due = None if fresh else extra_state.get(DUE)
    if (wall := metrics.get_meter("default", "wall")) is not None and wall.start_time is None:
        wall.start()  # which reading the meters of the checkpoint stops
    return extra_state


@replaces(checkpoint_utils, "load_model_ensemble_and_task")
def split_ensembles(
    original: Callable,
    filenames: list[str],
    arg_overrides: dict | None = None,
    task: FairseqTask | None = None,
    strict: bool = True,
    suffix: str = "",
    *args,
    **kwargs,
) -> tuple:
    """`fairseq-eval-lm` takes `--path a.pt:b.pt` for one file. Now it is an ensemble, as in fairseq's other tools."""
    whole = {name for name in filenames if os.path.exists(name) or os.path.exists(name.replace(".pt", f"{suffix}.pt"))}
    split = [part for name in filenames for part in ([name] if name in whole else utils.split_paths(name))]
    if task is not None:  # it has its own options, and all overrides are for the model
        arg_overrides = ModelOverrides(arg_overrides or {})
    return original(split, arg_overrides, task, strict, suffix, *args, **kwargs)


@replaces(models, "build_model")
def build_what_the_options_say(original: Callable, cfg: Any, task: FairseqTask, from_checkpoint: bool = False) -> nn.Module:
    """fairseq accepts options that no part of a model reads; now a new model of this project refuses them. A string that is no
    literal is refused by its option's name. `--options-from` takes over the options of a checkpoint; new checkpoints hold these,
    and those that a model found in a folder, as if they had been given. fairseq accepts any dictionary of the checkpoint's size;
    now one with other words, or in another order, is refused. `--quant-noise-scalar` works with dense layers of a class of their
    own."""
    if from_checkpoint:
        check_the_last_one(task)
    take_options_over(cfg)
    if not from_checkpoint:  # its checkpoints say so, although models of translation leave out what was not given
        add_options(cfg, dict.fromkeys(newer_options(as_dict(cfg)), False))
    with naming(cfg):
        model = original(cfg, task, from_checkpoint)
    if found := getattr(model, "found_options", None):
        add_options(cfg, found)
    if not from_checkpoint and hasattr(model, "refuse_without_effect"):
        model.refuse_without_effect(cfg)
    for kind in {type(module) for module in model.modules()} - QUANTISED.keys():
        if like := next((known for known in QUANTISED if issubclass(kind, known)), None):
            QUANTISED[kind] = QUANTISED[like]
    return model
