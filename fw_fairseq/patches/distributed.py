"""Several workers

Runs on CPUs, and runs that resume on several workers.
"""

from __future__ import annotations

import os

import torch
from fairseq import distributed_utils
from fairseq.models import distributed_fairseq_model
from fairseq.utils import safe_getattr, safe_hasattr
from torch.multiprocessing import ProcessRaisedException

from ..errors import Mistake
from .checkpoints.lock import release
from .mistakes import last_line
from .option_values import check_bounds, check_training
from .replacing import replaces
from .stopping import as_parent_of_workers, is_training, started_from_outside


@replaces(distributed_utils, "_broadcast_object_slow")
def broadcast_with_torch(original, obj, src_rank, group, dist_device):
    """When a run resumes, one worker sends the checkpoint to the others through `torch.load`, which since torch 2.6 refuses the
    options in it. Now torch broadcasts the object itself."""
    box = [obj]
    torch.distributed.broadcast_object_list(box, src_rank, group, dist_device)
    return box[0]


@replaces(distributed_utils, "infer_init_method")
def count_workers_as_their_launcher_does(original, cfg, *args, **kwargs) -> None:
    """fairseq takes the number of GPUs for the number of workers, also where torchrun, mpirun or Kubernetes has started the workers
    and says in `WORLD_SIZE` how many there are. On CPUs, or with one GPU each, every worker then trains alone and overwrites the
    others' checkpoints. Now that number is used."""
    if cfg.distributed_init_method is None and started_from_outside():
        cfg.distributed_world_size = int(os.environ["WORLD_SIZE"])
        if cfg.distributed_world_size > 1 and not torch.cuda.device_count():
            cfg.distributed_init_method, cfg.distributed_rank = "env://", int(os.environ["RANK"])
            cfg.distributed_no_spawn = True
            return None
    return original(cfg, *args, **kwargs)


@replaces(distributed_utils, "_infer_single_node_init")
def ask_for_a_gpu_for_each_worker(original, cfg) -> None:
    """`--distributed-world-size` with more workers than GPUs ends in an AssertionError. Now one sentence says how to start workers
    on CPUs."""
    workers, gpus = cfg.distributed_world_size, torch.cuda.device_count()
    if workers > gpus:
        said = f"--distributed-world-size is {workers}, and this machine has {gpus} GPUs"
        raise Mistake(f"{said}; give at most as many workers, or start them on CPUs with torchrun --nproc-per-node {workers}")
    original(cfg)


@replaces(distributed_utils, "call_main")
def suit_workers_to_cpus(original, cfg, main, **kwargs):
    """With `--ddp-backend fully_sharded` fairscale asks for a GPU in the middle of its work and fails with a traceback. Now the
    option is refused before the run starts. On CPUs, workers talk through `gloo` where `--distributed-backend` is `nccl`,
    fairseq's default, which is for GPUs. A training or a validation without a batch size is refused in one sentence, and so are
    numbers that end in a traceback or in one batch of all texts, such as `--seed -1` and `--batch-size 0`, a schedule of the
    learning rate that lacks a number, a `--best-checkpoint-metric` that no validation has, and `fairseq-eval-lm` with a task that
    reads no text. The locks of save directories end with the run."""
    check_bounds(cfg)
    if is_training(main):
        check_training(cfg)
    if "eval_lm" in getattr(main, "__globals__", {}) and not safe_hasattr(cfg.task, "data"):
        task = safe_getattr(cfg.task, "_name", "")
        raise Mistake(f"--task is {task}, which reads no DATA, as fairseq-eval-lm does; evaluate its models by fairseq-validate")
    validates = "override_args" in kwargs  # which fairseq-validate alone hands on
    if (is_training(main) or validates) and cfg.dataset.max_tokens is None and cfg.dataset.batch_size is None:
        what = "validation" if validates else "training"
        raise Mistake(f"--max-tokens or --batch-size is missing; a {what} needs the size of its batches")
    on_cpus = cfg.common.cpu or not torch.cuda.is_available()
    if cfg.distributed_training.ddp_backend == "fully_sharded" and on_cpus:
        raise Mistake("--ddp-backend fully_sharded shards over GPUs only; on CPUs use pytorch_ddp or legacy_ddp")
    if cfg.distributed_training.distributed_backend == "nccl" and on_cpus:
        cfg.distributed_training.distributed_backend = "gloo"
    try:
        with as_parent_of_workers(main, cfg):
            return original(cfg, main, **kwargs)
    except (KeyError, ProcessRaisedException) as error:
        name = cfg.checkpoint.best_checkpoint_metric
        if not is_training(main) or last_line(error) != f"KeyError: {name!r}":
            raise
        raise Mistake(f"--best-checkpoint-metric is {name}, which a validation does not report; name one that it logs") from error
    finally:
        release()


@replaces(distributed_fairseq_model, "DistributedDataParallel")
def give_no_gpu_on_cpus(original, module, device_ids, output_device, **options):
    """fairseq gives torch's `DistributedDataParallel` the number of a GPU on CPUs too, and torch refuses it. Now a model on a CPU
    gets none."""
    if next(module.parameters()).device.type == "cpu":
        device_ids = output_device = None
    return original(module=module, device_ids=device_ids, output_device=output_device, **options)
