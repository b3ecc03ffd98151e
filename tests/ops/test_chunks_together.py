"""Chunks that run side by side compute what they compute one after another."""

from __future__ import annotations

import functools

import pytest
import torch
from support.draws import CHUNKED, assert_same, draw_gates, draw_inputs, run_with_gradients
from torch.nn import functional as F

from fw_fairseq.ops import fast_weight
from fw_fairseq.ops.chunkwise import scan
from fw_fairseq.ops.chunkwise.frames import ChannelGates, Steps, TokenGates
from fw_fairseq.ops.chunkwise.large_gates import LargeChannelGates
from fw_fairseq.rules import RULES

SHAPE = (2, 3, 200, 6, 5)  # six chunks and a part


def test_which_chunks_run_together():
    plan = [(slice(32 * i, 32 * i + 32), TokenGates) for i in range(5)] + [(slice(160, 170), TokenGates)]
    plan += [(slice(170, 202), LargeChannelGates), (slice(202, 234), LargeChannelGates), (slice(234, 266), ChannelGates)]
    plan += [(slice(266, 298), Steps), (slice(298, 330), Steps)]
    runs = [((run.span.start, run.span.stop), run.count) for run in scan.together(plan, 2, 192)]
    ends = [((170, 234), 1), ((234, 266), 1), ((266, 298), 1), ((298, 330), 1)]
    assert runs == [((0, 96), 3), ((96, 160), 2), ((160, 170), 1), *ends]
    assert [run.span for run in scan.together(plan, 3, 1)] == [span for span, _ in plan] and scan.together([], 1, 1) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rule", CHUNKED)
def test_chunks_together_equal_chunks_one_by_one(rule, dtype, monkeypatch):
    """With small gates in one chunk and gates of 0 in another."""
    inputs, gates = draw_inputs(SHAPE, dtype), draw_gates(RULES[rule], SHAPE, dtype)
    for name, gate in gates.items():
        with torch.no_grad():
            gate.copy_(F.normalize(gate, dim=-1) if name == "kappa" else 0.85 + 0.1 * gate)
            gate[:, :, 100], gate[:, :, 140] = 1e-3, 0
    results = []
    for most in (10**6, 1):
        monkeypatch.setattr(scan, "TOGETHER", most)
        call = functools.partial(fast_weight, **inputs, rule=rule, gates=gates, backend="chunkwise")
        results.append(run_with_gradients(inputs | gates, call))
    assert_same(*results, 1e-12 if dtype == torch.float64 else 2e-5)
