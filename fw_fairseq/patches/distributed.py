"""Several workers on CPUs, and a resumed run on several workers."""

from __future__ import annotations

import os

import torch


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
