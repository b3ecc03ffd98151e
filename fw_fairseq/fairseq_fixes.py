"""What fairseq 0.12 lacks on today's torch and NumPy, and what its tools leave undone. Applied once, by ``registration``."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import types

import fairseq.trainer
import numpy
import torch
from fairseq import checkpoint_utils, distributed_utils, models, utils
from fairseq.data import Dictionary, data_utils, indexed_dataset
from fairseq.file_io import PathManager
from fairseq.models import distributed_fairseq_model
from fairseq.search import DiverseBeamSearch
from fairseq.tasks.fairseq_task import FairseqTask
from fairseq.trainer import Trainer

from .damaged_files import add_from_file, load_checkpoint_to_cpu, load_ema_from_checkpoint, make_dataset, why
from .literals import naming, replace_eval
from .non_finite import FirstNonFinite


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


def copy(original, source, target, overwrite=False):
    """checkpoint_last.pt is a copy, which a kill could leave half written; a rename is all or nothing."""
    if PathManager.path_requires_pathmanager(target):
        return original(source, target, overwrite)
    if os.path.exists(target) and not overwrite:
        return False
    with named_if_not_written(target):
        shutil.copyfile(source, f"{target}.tmp")
    os.replace(f"{target}.tmp", target)
    return True


def torch_persistent_save(original, obj, filename, *args, **kwargs):
    with named_if_not_written(filename):
        return original(obj, filename, *args, **kwargs)


@contextlib.contextmanager
def named_if_not_written(path):
    """Of a full disk the system and torch say neither what did not fit, nor do they take its first part away."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error):
            raise
        with contextlib.suppress(OSError):
            os.remove(f"{path}.tmp")
        raise OSError(f"{path} cannot be written ({why(error)})") from error


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


def infer_init_method(original, cfg, *args, **kwargs):
    """Under torchrun fairseq counts GPUs for workers: without them each would train alone, over the others' checkpoints."""
    if cfg.distributed_init_method is None and torch.distributed.is_torchelastic_launched():
        cfg.distributed_world_size = int(os.environ["WORLD_SIZE"])
        if cfg.distributed_world_size > 1 and not torch.cuda.device_count():
            cfg.distributed_init_method, cfg.distributed_rank = "env://", int(os.environ["RANK"])
            cfg.distributed_no_spawn = True
            return None
    return original(cfg, *args, **kwargs)


def call_main(original, cfg, main, **kwargs):
    """fairscale, which shards for fairseq, asks for a GPU in the middle of its work."""
    if cfg.distributed_training.ddp_backend == "fully_sharded" and (cfg.common.cpu or not torch.cuda.is_available()):
        raise ValueError("--ddp-backend fully_sharded shards over GPUs only; on CPUs use pytorch_ddp or legacy_ddp")
    return original(cfg, main, **kwargs)


def DistributedDataParallel(original, module, device_ids, output_device, **options):
    """fairseq gives the number of a GPU on CPUs too, which torch refuses."""
    if next(module.parameters()).device.type == "cpu":
        device_ids = output_device = None
    return original(module=module, device_ids=device_ids, output_device=output_device, **options)


def __del__(original, text):
    """Of a binarised text that could not be opened: there is nothing to close."""
    if hasattr(text, "_bin_buffer_mmap"):
        original(text)


def batch_by_size(original, indices, *args, **kwargs):
    """fairseq 0.12.3 leaves out the last batch if its size is not a multiple of 8: sentences never translated, never scored."""
    indices = numpy.fromiter(indices, dtype=numpy.int64)
    if not len(indices):
        return []  # it would look for the last batch
    batches = list(original(indices, *args, **kwargs))
    rest = indices[sum(map(len, batches)) :]
    return batches + ([rest] if len(rest) else [])


def get_batch_iterator(original, task, dataset, *args, epoch=1, **kwargs):
    """fairseq composes a run's batches once, and differently in each epoch that a run can begin with: resumed after its first epoch
    it was another run. Here all have the batches of the first. And a text without a batch is not evaluated to perplexity 1."""
    once = (
        task.can_reuse_epoch_itr(dataset) and not kwargs.get("disable_iterator_cache") and not kwargs.get("update_epoch_batch_itr")
    )
    if not once or dataset in task.dataset_to_epoch_iter:
        return original(task, dataset, *args, epoch=epoch, **kwargs)
    iterator = original(task, dataset, *args, epoch=1, **kwargs)
    if len(dataset) and not iterator.frozen_batches:
        most = kwargs.get("max_positions")
        raise ValueError(
            f"all {len(dataset)} texts are longer than the model's {most} positions; give a shorter --tokens-per-sample"
        )
    iterator.epoch = max(epoch, 1)
    dataset.set_epoch(epoch)
    return iterator


def step(original, search, step, lprobs, scores, prev_output_tokens=None, original_batch_idxs=None):
    """Diverse beams look their overlaps up by the sentences' numbers in the data set; it is their rows in the batch they need."""
    if original_batch_idxs is not None:
        if step == 0:
            search.first_idxs = original_batch_idxs
        original_batch_idxs = original_batch_idxs.unsqueeze(1).eq(search.first_idxs).int().argmax(1)
    return original(search, step, lprobs, scores, prev_output_tokens, original_batch_idxs)


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
