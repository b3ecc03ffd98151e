"""The CUDA operators on CPU tensors, run by the emulator."""

from __future__ import annotations

import contextlib

import torch

from fw_fairseq.autograd import OPERATORS
from fw_fairseq.ops.kernels import launch


@contextlib.contextmanager
def emulated(launcher):
    """The operators on CPU tensors, launching with ``launcher``."""
    with torch.library._scoped_library("fw_fairseq", "IMPL") as library, launch.use(launcher):
        for name, run in OPERATORS.items():
            library.impl(name, run, "CPU")
        yield launcher
