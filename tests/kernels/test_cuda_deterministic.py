"""Gradients have the same bits in every run: nothing is added up in an order that chance decides."""

from __future__ import annotations

import re

import pytest
import torch
from hostcuda import SCHEDULES, EmulatorLaunch
from hostcuda.hostemu import KERNELS
from support.cuda_scan import PRECISION, by_kernels, draw

from fw_fairseq.ops.kernels import launch
from fw_fairseq.ops.kernels.recurrence import FAMILIES

ATOMIC = re.compile(r"\batomic(\w+)\(([^,]*)|\b(?:red|atom)\.[\w.]+")
COUNTERS = {("Add", "counter"), ("Add", "p.counters"), ("Add", "p.counters + 1")}  # whole numbers, in gathered.cu


def test_no_kernel_adds_up_in_an_order_of_chance():
    found = {(m[1], m[2]) for path in KERNELS.glob("*.cu*") for m in ATOMIC.finditer(path.read_text())}
    assert found == COUNTERS


@pytest.mark.parametrize("family, rule, dtype", [
    ("linear", "gated", torch.bfloat16),
    ("decay", "decay", torch.bfloat16),
    ("delta", "gated_delta", torch.bfloat16),
    ("channel_delta", "kda", torch.float32),
])  # fmt: skip
def test_the_same_bits_in_any_schedule(one_thread, family, rule, dtype):
    """With two tiles of V, whose shares of a gradient are added up."""
    x = draw(rule, (1, 1, 40, 64, 144), dtype)
    dy, dmemory = torch.randn_like(x["v"]), torch.randn_like(x["memory"])
    first = None
    for policy, seed in SCHEDULES:
        with launch.use(EmulatorLaunch(policy, seed)) as launcher:
            results = by_kernels(FAMILIES[family], x, dy, dmemory, PRECISION[dtype], launcher)
        assert any(defines.get("FW_PARTIAL") for _, _, defines in launcher.calls)
        first = first or results
        for name, found in results.items():
            assert found.equal(first[name]), (name, policy, seed)


@pytest.mark.parametrize("family, rule", [("linear", "gated"), ("delta", "gated_delta")])
def test_parts_side_by_side_change_no_bit(one_thread, family, rule):
    """The memory's adjoint before a part is what one block would have had there."""
    x = draw(rule, (1, 2, 600, 64, 64), torch.bfloat16)
    dy, dmemory = torch.randn_like(x["v"]), torch.randn_like(x["memory"])
    results = []
    for blocks in (1, 8):
        device = EmulatorLaunch()
        device.blocks = blocks
        results.append(by_kernels(FAMILIES[family], x, dy, dmemory, "bf16", device))
        assert device.calls[-1][2]["FW_SIDES"] == (blocks > 1)
    whole, parts = results
    assert all(found.equal(parts[name]) for name, found in whole.items() if name.startswith("gradient"))
