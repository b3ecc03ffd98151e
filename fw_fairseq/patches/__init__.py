"""What fairseq 0.12 lacks on today's torch and NumPy, and what its tools leave undone. They are applied
once, when ``fw_fairseq.models`` is imported."""

from __future__ import annotations

import functools
import types

import fairseq.trainer
import numpy
from fairseq import checkpoint_utils, distributed_utils, models
from fairseq.data import Dictionary, data_utils, indexed_dataset
from fairseq.file_io import PathManager
from fairseq.models import distributed_fairseq_model
from fairseq.search import DiverseBeamSearch
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.trainer import Trainer

from .batches import __del__, batch_by_size, get_batch_iterator, step
from .distributed import DistributedDataParallel, _broadcast_object_slow, call_main, infer_init_method
from .literals import replace_eval
from .non_finite import FirstNonFinite
from .reading import add_from_file, load_checkpoint_to_cpu, load_ema_from_checkpoint, make_dataset
from .training import __init__, build_model, load_checkpoint, load_model_ensemble_and_task, train_step
from .writing import copy, save_checkpoint, torch_persistent_save


def apply() -> None:
    replace_eval()
    # fairseq generates and translates with numpy.compat.long, which NumPy 2 no longer has.
    if not hasattr(numpy, "compat"):
        numpy.compat = types.SimpleNamespace(long=int)  # noqa: NPY201
    fairseq.trainer.NanDetector = FirstNonFinite
    for owner, change in CHANGES:
        original = getattr(owner, change.__name__)
        if not hasattr(original, "changed_by"):
            setattr(owner, change.__name__, changed(original, change))


def changed(original, change):
    """A function, which a class binds as its method."""

    @functools.wraps(original)
    def call(*args, **kwargs):
        return change(original, *args, **kwargs)

    call.changed_by = change
    return call


CHANGES = (
    (checkpoint_utils, load_checkpoint_to_cpu),
    (checkpoint_utils, load_ema_from_checkpoint),
    (checkpoint_utils, load_model_ensemble_and_task),
    (checkpoint_utils, torch_persistent_save),
    (Trainer, __init__),
    (Trainer, load_checkpoint),
    (Trainer, train_step),
    (checkpoint_utils, save_checkpoint),
    (models, build_model),
    (PathManager, copy),
    (distributed_utils, _broadcast_object_slow),
    (distributed_utils, infer_init_method),
    (distributed_utils, call_main),
    (distributed_fairseq_model, DistributedDataParallel),
    (Dictionary, add_from_file),
    (indexed_dataset, make_dataset),
    (indexed_dataset.MMapIndexedDataset, __del__),
    (indexed_dataset.MMapIndexedDataset.Index, __del__),
    (data_utils, batch_by_size),
    (FairseqTask, get_batch_iterator),
    (DiverseBeamSearch, step),
)
