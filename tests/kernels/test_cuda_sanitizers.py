"""Every kernel under the sanitizers, on the emulator: races between threads, accesses outside tensors and fixed arrays."""

from __future__ import annotations

import pytest
import torch
from hostcuda import run_sanitized

DELTA = {"thread": "test_cuda_delta.sanitized(160, 32)", "address": "test_cuda_delta.sanitized(20, 20)"}
OTHERS = [
    f"test_cuda_{name}.sanitized()"
    for name in ("step", "scan", "divided", "channel_delta", "maps", "fp16", "sru", "pooling", "gathered")
]


def start() -> None:
    """Runs before kernels: the inputs are the same in every process, and memory starts as NaN."""
    assert torch.initial_seed() == 0 and torch.empty(4).isnan().all()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["thread", "address"])
def test_every_kernel_is_clean(kind):
    run_sanitized(kind, "test_cuda_sanitizers.start()", *OTHERS, DELTA[kind])
