"""Logs

A line has the numbers that people read, those of the layers are in a file, and an evaluation says how far it is.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import shlex
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator

from fairseq import trainer
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import progress_bar
from fairseq.logging.progress_bar import BaseProgressBar, format_stat
from omegaconf import DictConfig
from torch import nn

from .replacing import changes, replaces

LAYERS = "layers.jsonl"  # in the save directory
OF_LAYERS = "fw_"  # how the names of the layers' numbers begin
PROGRAMS = [f"fairseq_cli.{name}" for name in ("train", "validate", "eval_lm", "generate", "interactive")]
FIRST, EVERY = 10, 60  # seconds until an evaluation says how far it is
logger = logging.getLogger(__name__)


@replaces(progress_bar, "progress_bar")
def name_the_save_directory(original: Callable, *args, **kwargs) -> BaseProgressBar:
    """The numbers of a model's layers, such as `fw_0_gate`, fill the lines of fairseq's log. Now they are in `layers.jsonl` in the
    save directory, and in TensorBoard and W&B as before."""
    bar = found = original(*args, **kwargs)
    while hasattr(bar, "wrapped_bar"):
        bar = bar.wrapped_bar
    if folder := kwargs.get("aim_param_checkpoint_dir"):
        bar.log = functools.partial(without_layers, bar.log, bar.epoch, folder, prefixed=False)
        bar.print = functools.partial(without_layers, bar.print, bar.epoch, folder, prefixed=True)
    return found


def without_layers(
    show: Callable, epoch: int, folder: str, stats: dict, tag: str | None = None, step: int | None = None, *, prefixed: bool
) -> None:
    """Shows the numbers that are not of layers, and adds the others to the file."""
    layers = {name: x for name, x in stats.items() if name.startswith(OF_LAYERS)}
    if layers and distributed_utils.get_global_rank() == 0:
        layers = {name: stats[name] for name in ("num_updates",) if name in stats} | layers
        prefix = f"{tag}_" if prefixed else ""  # as in fairseq's logs
        line = json.dumps({"epoch": epoch, **{prefix + name: format_stat(x) for name, x in layers.items()}})
        with open(os.path.join(folder, LAYERS), "a", encoding="utf-8") as file:
            file.write(line + "\n")
    show({name: x for name, x in stats.items() if not name.startswith(OF_LAYERS)}, tag=tag, step=step)


@replaces(trainer, "_catalog_shared_params")
def leave_out_what_is_not_there(original: Callable, module: nn.Module, memo: dict | None = None, prefix: str = "") -> list | None:
    """fairseq lists all biases that a model lacks as one shared parameter. Now it lists parameters only."""
    found = original(module, memo, prefix)
    if memo is not None:
        return found
    return [names for names in found if trainer._get_module_by_path(module, names[0]) is not None]


@changes("logging")
def begin_with_the_command() -> None:
    """The log of each program begins with all options that there are, all modules of the model, and advice from Hydra and torch
    about fairseq's code. Now it begins with the command; checkpoints have the options."""
    warnings.filterwarnings("ignore", module="hydra")
    for of_fairseq in (r"\s*'config' is validated", "'pin_memory' argument is set", r"`torch\.cuda\.amp"):
        warnings.filterwarnings("ignore", message=of_fairseq)
    for name in PROGRAMS:
        logging.getLogger(name).addFilter(shorten)


def shorten(record: logging.LogRecord) -> bool:
    """Puts the command in place of options, and drops a model."""
    if isinstance(record.msg, (DictConfig, Namespace, dict)):
        record.msg = shlex.join([os.path.basename(sys.argv[0]), *sys.argv[1:]])
    return not isinstance(record.msg, nn.Module)


class Announced:
    """Batches of a text; while they are read, the log says once a minute how many words are left."""

    def __init__(self, batches: Iterable, words: int) -> None:
        self.batches, self.words, self.n = batches, words, getattr(batches, "n", 0)

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[dict]:
        begin, done, due = time.monotonic(), 0, FIRST
        for batch in self.batches:
            yield batch
            done += batch.get("ntokens", 0)
            taken = time.monotonic() - begin
            if taken >= due and 0 < done < self.words:
                speed, due = done / taken, due + EVERY
                left = f"{(self.words - done) / speed / 60:.0f} minutes left"
                logger.info("evaluated %s of %s words, %s words/s, %s", f"{done:,}", f"{self.words:,}", f"{speed:,.0f}", left)
