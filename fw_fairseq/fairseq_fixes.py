"""What fairseq 0.12 lacks on today's torch and NumPy, and what its tools leave undone. Applied once, by ``registration``."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import pickle
import types

import numpy
import torch
from fairseq import checkpoint_utils, distributed_utils, utils
from fairseq.data import data_utils
from fairseq.search import DiverseBeamSearch


def apply() -> None:
    # torch 2.6 and newer load checkpoints without running their pickled code; what fairseq's hold is plain data: the options in a
    # Namespace, and with --eval-bleu NumPy's numbers.
    rebuilding = [x.__reduce__()[0] for x in (numpy.zeros(1), numpy.float64(0))]
    types_ = [numpy.ndarray, numpy.dtype, *(type(numpy.dtype(kind)) for kind in (float, int))]
    torch.serialization.add_safe_globals([argparse.Namespace, *rebuilding, *types_])
    # fairseq generates and translates with numpy.compat.long, which NumPy 2 no longer has.
    if not hasattr(numpy, "compat"):
        numpy.compat = types.SimpleNamespace(long=int)  # noqa: NPY201
    for owner, change in CHANGES:
        original = getattr(owner, change.__name__)
        if not hasattr(original, "__wrapped__"):
            setattr(owner, change.__name__, changed(original, change))


def changed(original, change):
    """A function, which a class binds as its method."""

    @functools.wraps(original)
    def call(*args, **kwargs):
        return change(original, *args, **kwargs)

    return call


def load_checkpoint_to_cpu(original, path, *args, **kwargs):
    with naming(path):
        return original(path, *args, **kwargs)


@contextlib.contextmanager
def naming(path):
    """A file that is cut short or something else is named."""
    try:
        yield
    except (FileNotFoundError, PermissionError):
        raise
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{path} cannot be read as a fairseq checkpoint ({reason}); use another one of its folder") from error


def load_model_ensemble_and_task(original, filenames, *args, **kwargs):
    """fairseq-eval-lm hands over 'a.pt:b.pt' as one file; all of fairseq's other tools take it for an ensemble."""
    split = [part for name in filenames for part in ([name] if os.path.exists(name) else utils.split_paths(name))]
    return original(split, *args, **kwargs)


def save_checkpoint(original, cfg, trainer, epoch_itr, val_loss):
    """Every worker passes here, one writes: the moment to collect what each of them remembers."""
    if hasattr(epoch_itr, "collect"):
        epoch_itr.collect()
    return original(cfg, trainer, epoch_itr, val_loss)


def _broadcast_object_slow(original, obj, src_rank, group, dist_device):
    """A resuming worker hands the checkpoint to the others by torch.load, which since torch 2.6 refuses the options in there."""
    box = [obj]
    torch.distributed.broadcast_object_list(box, src_rank, group, dist_device)
    return box[0]


def batch_by_size(original, indices, *args, **kwargs):
    """fairseq 0.12.3 leaves out the last batch if its size is not a multiple of 8: sentences never translated, never scored."""
    batches = list(original(indices, *args, **kwargs))
    rest = numpy.fromiter(indices, dtype=numpy.int64)[sum(map(len, batches)) :]
    return batches + ([rest] if len(rest) else [])


def step(original, search, step, lprobs, scores, prev_output_tokens=None, original_batch_idxs=None):
    """Diverse beams look their overlaps up by the sentences' numbers in the data set; it is their rows in the batch they need."""
    if original_batch_idxs is not None:
        if step == 0:
            search.first_idxs = original_batch_idxs
        original_batch_idxs = original_batch_idxs.unsqueeze(1).eq(search.first_idxs).int().argmax(1)
    return original(search, step, lprobs, scores, prev_output_tokens, original_batch_idxs)


CHANGES = (
    (checkpoint_utils, load_checkpoint_to_cpu),
    (checkpoint_utils, load_model_ensemble_and_task),
    (checkpoint_utils, save_checkpoint),
    (distributed_utils, _broadcast_object_slow),
    (data_utils, batch_by_size),
    (DiverseBeamSearch, step),
)
