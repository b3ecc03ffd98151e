"""The CUDA operators on CPU tensors, run by the emulator."""

from __future__ import annotations

import contextlib

import torch

from fw_fairseq.ops.kernels import launch as cuda_launch
from fw_fairseq.ops.kernels import pooling as cuda_pooling
from fw_fairseq.ops.kernels import recurrence as cuda
from fw_fairseq.ops.kernels import sru as cuda_sru
from fw_fairseq.ops.kernels import step as cuda_step


@contextlib.contextmanager
def emulated(launcher):
    """The operators on CPU tensors, launching with ``launcher``."""
    with torch.library._scoped_library("fw_fairseq", "IMPL") as library, cuda_launch.use(launcher):
        library.impl("scan", cuda.scan, "CPU")
        library.impl("scan_backward", cuda.scan_backward, "CPU")
        library.impl("step", cuda_step.step_operator, "CPU")
        library.impl("sru", cuda_sru.forward, "CPU")
        library.impl("sru_backward", cuda_sru.backward, "CPU")
        library.impl("pool", cuda_pooling.forward, "CPU")
        library.impl("pool_backward", cuda_pooling.backward, "CPU")
        yield launcher
