"""recall against the recurrence: the last output of the step form."""

from __future__ import annotations

import pytest
import torch
from support.draws import FITTING, assert_same, draw_gates, draw_inputs

from fw_fairseq.ops import fast_weight
from fw_fairseq.ops.chunkwise.recall import recall
from fw_fairseq.ops.recurrent import step_form
from fw_fairseq.rules import RULES, Coefficients

pytestmark = pytest.mark.quick

SHAPE = (2, 3, 17, 5, 4)


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("rule", [name for name in FITTING if RULES[name].simple])
def test_recall_is_the_last_read_of_the_recurrence(rule, extreme):
    inputs, gates = draw_inputs(SHAPE), draw_gates(RULES[rule], SHAPE, extreme=extreme)
    leaves = inputs | gates
    y, _ = fast_weight(**inputs, rule=rule, gates=gates, backend="recurrent")
    recalled, weights = recall(inputs["q"][:, :, -1:], inputs["k"], inputs["v"], RULES[rule].coefficients(**gates))
    results = []
    for last in (y[:, :, -1:], recalled):
        grads = torch.autograd.grad(last.square().sum(), list(leaves.values()), allow_unused=True)
        grads = (torch.zeros_like(x) if grad is None else grad for grad, x in zip(grads, leaves.values()))
        results.append({"y": last.detach()} | dict(zip(leaves, grads)))
    assert_same(results[1], results[0], 1e-8)
    if RULES[rule].coefficients(**gates).z is None:
        torch.testing.assert_close(weights @ inputs["v"], recalled)


def test_several_queries_are_read_each_for_itself():
    inputs, gates = draw_inputs(SHAPE), draw_gates(RULES["delta"], SHAPE)
    coefficients = RULES["delta"].coefficients(**gates)
    together, _ = recall(inputs["q"], inputs["k"], inputs["v"], coefficients)
    alone = [recall(query, inputs["k"], inputs["v"], coefficients)[0] for query in inputs["q"].split(1, 2)]
    torch.testing.assert_close(together, torch.cat(alone, 2))


@pytest.mark.parametrize("present", ["fe", "few", "fzew", "ze", "fz", "zw"])
@pytest.mark.parametrize("extreme", [False, True])
def test_any_coefficients(present, extreme):
    """Per-channel decay with an erase over several chunks, a value-side decay beside it, and their gradients."""
    shape = (2, 2, 75, 5, 4)
    inputs, sizes = draw_inputs(shape), {"f": shape[:4], "z": (*shape[:3], shape[4]), "e": shape[:3], "w": shape[:3]}
    drawn = {name: torch.rand(sizes[name], dtype=torch.float64) * 0.98 + 0.01 for name in present}
    if extreme:
        drawn = {n: torch.where(torch.rand(x.shape) < 0.5, 1e-6, x) if n in "fz" else x for n, x in drawn.items()}
    drawn = {name: x.requires_grad_() for name, x in drawn.items()}
    coefficients, leaves = Coefficients(**drawn), inputs | drawn
    memory = torch.zeros(2, 2, 5, 4, dtype=torch.float64)
    y, _ = step_form(*inputs.values(), coefficients, memory)
    recalled, weights = recall(inputs["q"][:, :, -1:], inputs["k"], inputs["v"], coefficients)
    results = []
    for last in (y[:, :, -1:], recalled):
        grads = torch.autograd.grad(last.square().sum(), list(leaves.values()), retain_graph=True)
        results.append({"y": last.detach()} | dict(zip(leaves, grads)))
    assert_same(results[1], results[0], 1e-8)
    assert weights.shape == (2, 2, 1, 75)
