"""Workers

Workers find each other on CPUs too.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from fairseq import distributed_utils
from fairseq.models import distributed_fairseq_model
from torch import nn

from ..config import refuse_below
from .checkpoints.saving import release
from .replacing import changes, replaces
from .stopping import as_parent_of_workers, started_from_outside

SIZES = ("max_tokens", "batch_size", "max_tokens_valid", "batch_size_valid")


@changes("multiprocessing")
def fork_processes() -> None:
    """Since Python 3.14 a process that loads data gets its data set pickled, which fails if it has a function or a lock. Now Linux
    forks it, as earlier versions do."""
    if sys.version_info >= (3, 14) and sys.platform == "linux" and multiprocessing.get_start_method() == "forkserver":
        multiprocessing.set_start_method("fork", force=True)


@replaces(distributed_utils, "_broadcast_object_slow")
def broadcast_with_torch(original: Callable, obj: object, src_rank: int, group: Any, dist_device: Any) -> object:
    """On resuming, one worker sends the checkpoint to the others through `torch.load`, which refuses its options since torch 2.6.
    Now torch broadcasts the object itself."""
    box = [obj]
    torch.distributed.broadcast_object_list(box, src_rank, group, dist_device)
    return box[0]


@replaces(distributed_utils, "infer_init_method")
def count_workers_as_their_launcher_does(original: Callable, cfg: Any, *args, **kwargs) -> None:
    """fairseq takes the number of GPUs for that of workers, even if torchrun, mpirun or Kubernetes has started them. On CPUs, or
    with one GPU each, every worker then trains alone and overwrites the others' checkpoints. Now `WORLD_SIZE` counts them."""
    if cfg.distributed_init_method is None and started_from_outside():
        cfg.distributed_world_size = int(os.environ["WORLD_SIZE"])
        if cfg.distributed_world_size > 1 and not torch.cuda.device_count():
            cfg.distributed_init_method, cfg.distributed_rank = "env://", int(os.environ["RANK"])
            cfg.distributed_no_spawn = True
            return None
    return original(cfg, *args, **kwargs)


@replaces(distributed_utils, "call_main")
def suit_workers_to_cpus(original: Callable, cfg: Any, main: Callable, **kwargs) -> None:
    """On CPUs, workers now talk through `gloo` instead of `nccl`, fairseq's default. A batch of 0 sentences or tokens, which holds
    all texts, is refused. The locks of save directories end with the run."""
    for name in SIZES:
        refuse_below(cfg.dataset, name, 1)
    if cfg.distributed_training.distributed_backend == "nccl" and (cfg.common.cpu or not torch.cuda.is_available()):
        cfg.distributed_training.distributed_backend = "gloo"
    try:
        with as_parent_of_workers(main, cfg):
            return original(cfg, main, **kwargs)
    finally:
        release()


@replaces(distributed_fairseq_model, "DistributedDataParallel")
def give_no_gpu_on_cpus(original: Callable, module: nn.Module, device_ids: Any, output_device: Any, **options) -> nn.Module:
    """fairseq passes torch's `DistributedDataParallel` the number of a GPU on CPUs too, which torch refuses. Now it passes none."""
    if next(module.parameters()).device.type == "cpu":
        device_ids = output_device = None
    return original(module=module, device_ids=device_ids, output_device=output_device, **options)
