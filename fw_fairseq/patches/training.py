"""Training: clear errors, ensembles in fairseq-eval-lm, and where a NaN came from."""

from __future__ import annotations

import os

import torch
from fairseq import utils

from .literals import naming
from .non_finite import FirstNonFinite


def train_step(original, trainer, *args, **kwargs):
    """A loss that is not a number says where it came from."""
    try:
        return original(trainer, *args, **kwargs)
    except FloatingPointError as error:
        where = f"{FirstNonFinite.sentence}, at update {trainer.get_num_updates() + 1}"
        raise FloatingPointError(f"{error}; {where}; {trainer.cfg.checkpoint.save_dir}/crash.pt has the parameters") from None


def __init__(original, trainer, cfg, *args, **kwargs):
    """fairseq trains in half precision on GPUs, and asks for one in the middle of its work; without any it takes bf16 for a TPU."""
    halves = ("memory_efficient_fp16", "memory_efficient_bf16", "fp16", "bf16")
    given = next((name for name in halves if getattr(cfg.common, name)), None)
    tpu = cfg.common.tpu and utils.xm is not None
    if given and not tpu and (cfg.common.cpu or not torch.cuda.is_available()):
        raise ValueError(f"--{given.replace('_', '-')} trains on GPUs only; leave it out, or use --amp")
    original(trainer, cfg, *args, **kwargs)


def load_checkpoint(original, trainer, filename, *args, **kwargs):
    """fairseq has words of its own in place of what the model says of parameters that do not fit."""
    try:
        return original(trainer, filename, *args, **kwargs)
    except Exception as error:
        if type(error) is Exception and isinstance(error.__context__, ValueError):
            raise ValueError(f"{filename}: {error.__context__}") from error
        raise


def load_model_ensemble_and_task(original, filenames, *args, **kwargs):
    """fairseq-eval-lm hands over 'a.pt:b.pt' as one file; all of fairseq's other tools take it for an ensemble."""
    split = [part for name in filenames for part in ([name] if os.path.exists(name) else utils.split_paths(name))]
    return original(split, *args, **kwargs)


def build_model(original, cfg, *args, **kwargs):
    """An option that is no literal is refused by its name."""
    with naming(cfg):
        return original(cfg, *args, **kwargs)
