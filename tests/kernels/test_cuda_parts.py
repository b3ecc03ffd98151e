"""A sequence in parts gives what one pass gives: values, memories and every gradient."""

from __future__ import annotations

import pytest
import torch
from support.cuda_scan import by_family
from support.draws import FITTING, assert_same, draw_gates, draw_inputs, run_with_gradients

from fw_fairseq.ops import FastWeightState
from fw_fairseq.ops.chunkwise.scan import chunk_form
from fw_fairseq.ops.kernels import recurrence
from fw_fairseq.ops.kernels.recurrence import choose_parts
from fw_fairseq.ops.parallel.parts import chain, run_parts
from fw_fairseq.ops.recurrent import step_form
from fw_fairseq.rules import RULES, Coefficients


def strength_per_token(rule: str) -> bool:
    """Whether the forms get the rule's w: one per value channel is a part of v before."""
    w = RULES[rule].coefficients(**draw_gates(RULES[rule], (1, 1, 1, 2, 2))).w
    return w is None or w.dim() == 3


CASES = [*filter(strength_per_token, FITTING), "erase and both decays"]


def draw(rule: str, shape, dtype=torch.float64, resets: float = 0.0):
    """q, k, v, the coefficients that are present, memory; ``resets``: the share of tokens with f = 0."""
    if rule in RULES:
        coefficients = RULES[rule].coefficients(**draw_gates(RULES[rule], shape, torch.float64))._asdict()
    else:
        gates = draw_gates(RULES["decay"], shape, torch.float64) | draw_gates(RULES["delta"], shape, torch.float64)
        coefficients = {"f": gates["f"], "z": gates["z"], "e": gates["beta"], "w": None}
    if resets and coefficients["f"] is not None:
        kept = torch.rand(shape[0], 1, shape[2]) >= resets
        kept = kept if coefficients["f"].dim() == 3 else kept.unsqueeze(-1)
        coefficients["f"] = coefficients["f"] * kept
    work = torch.float64 if dtype == torch.float64 else torch.float32
    present = {n: c.detach().to(work).requires_grad_() for n, c in coefficients.items() if c is not None}
    memory = torch.randn(*shape[:2], *shape[3:], dtype=work).requires_grad_()
    return draw_inputs(shape, dtype) | present | {"memory": memory}


def results(leaves, run):
    coefficients = Coefficients(*(leaves.get(name) for name in "fzew"))

    def call():
        y, memory = run(leaves["q"], leaves["k"], leaves["v"], coefficients, leaves["memory"])
        return y, FastWeightState(memory)

    return run_with_gradients(leaves, call)


def in_parts(form, count):
    return lambda *inputs: run_parts(form, count, *inputs)


@pytest.mark.parametrize("count, resets", [(1, 0.1), (3, 0.0), (5, 0.1)])
@pytest.mark.parametrize("rule", CASES)
def test_equals_one_pass(one_thread, rule, count, resets):
    """28 tokens in 1, 3 and 5 parts, with remainders, and memories that are emptied on the way."""
    leaves = draw(rule, (2, 2, 28, 4, 3), resets=resets)
    assert_same(results(leaves, in_parts(step_form, count)), results(leaves, step_form), 1e-9)


@pytest.mark.parametrize("rule", [name for name in CASES if name in RULES])
def test_with_chunks(one_thread, rule):
    leaves = draw(rule, (1, 2, 150, 6, 5))
    assert_same(results(leaves, in_parts(chunk_form, 4)), results(leaves, step_form), 1e-8)


@pytest.mark.parametrize("tokens, count", [(1, 5), (5, 4), (4, 4), (7, 7)])
def test_as_short_as_it_gets(tokens, count):
    leaves = draw("delta", (1, 1, tokens, 3, 2))
    assert_same(results(leaves, in_parts(step_form, count)), results(leaves, step_form), 1e-9)


@pytest.mark.parametrize("rule", ["gated", "decay", "gated_delta"])
def test_16_bit_inputs(one_thread, rule):
    """y in the inputs' type, the memory in fp32."""
    leaves = draw(rule, (1, 2, 64, 8, 8), torch.bfloat16)
    run = in_parts(chunk_form, 4)
    assert_same(
        results(leaves, run), results({n: x.detach().double().requires_grad_() for n, x in leaves.items()}, step_form), 3e-2
    )


def test_long_decay_underflows_to_nothing():
    """A part's decay of 0.01^200 counts as 0, in values and gradients."""
    leaves = draw("gated", (1, 1, 400, 3, 2), torch.float32)
    leaves["f"] = torch.full_like(leaves["f"], 0.01).requires_grad_()
    assert_same(results(leaves, in_parts(chunk_form, 2)), results(leaves, chunk_form), 1e-5)


def test_one_sequence_is_not_copied():
    """B = 1 and a whole number of parts: the form sees views of the inputs."""
    q, k, v = (torch.randn(64, 1, 2 * 4).view(64, 1, 2, 4).permute(1, 2, 0, 3) for _ in range(3))
    seen = []

    def form(q, k, v, coefficients, memory):
        seen.append(q.data_ptr())
        return chunk_form(q, k, v, coefficients, memory)

    run_parts(form, 4, q, k, v, Coefficients(), torch.zeros(1, 2, 4, 4))
    assert seen == [q.data_ptr()] * 2


@pytest.mark.parametrize("rule", ["sum", "gated", "decay", "gated_delta"])
def test_on_kernels(emulate, monkeypatch, rule):
    """70 tokens in 4 parts: all parts run in one launch, again from their true memories, and backwards once."""
    monkeypatch.setattr(recurrence, "LEAST", 64)
    monkeypatch.setattr(recurrence, "SHORTEST", 16)
    launch = emulate()
    monkeypatch.setattr(launch, "blocks", 4)
    leaves = draw(rule, (1, 2, 70, 16, 16), torch.float32, resets=0.05)
    found = results(leaves, by_family)
    assert [kernel.split("_")[-1] for _, kernel, _ in launch.calls] == ["forward"] * (3 if rule == "gated_delta" else 2) + [
        "backward"
    ]
    assert_same(found, results({n: x.detach().double().requires_grad_() for n, x in leaves.items()}, step_form), 2e-5)


@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("kind", ["none", "numbers", "channels", "matrices"])
@pytest.mark.parametrize("value_side", [False, True])
def test_chain_is_a_loop_over_parts(kind, count, value_side):
    B, H, K, V = 2, 3, 4, 5
    shapes = {"none": None, "numbers": (B, count, H, 1), "channels": (B, count, H, K), "matrices": (B, count, H, K, K)}
    own, memory = (torch.randn(*shape, dtype=torch.float64) for shape in ((B, count, H, K, V), (B, H, K, V)))
    transfer = None if shapes[kind] is None else torch.rand(*shapes[kind], dtype=torch.float64)
    value_decay = torch.rand(B, count, H, 1, V, dtype=torch.float64) if value_side else None
    starts, end = chain(own, transfer, value_decay, memory)
    for part in range(count):
        torch.testing.assert_close(starts[:, part], memory, rtol=1e-12, atol=1e-12)
        if transfer is not None:
            left = transfer[:, part]
            memory = torch.einsum("bhij,bhjv->bhiv", left, memory) if kind == "matrices" else memory * left.unsqueeze(-1)
        memory = memory * value_decay[:, part] if value_side else memory
        memory = memory + own[:, part]
    torch.testing.assert_close(end, memory, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "sequences, tokens, processors, count",
    [
        (1, 16384, 132, 64),  # by the shortest part
        (8, 65536, 132, 33),  # by the processors, two for each
        (64, 65536, 132, 4),
        (67, 65536, 132, 1),  # the device is full enough
        (1, 4096, 132, 16),
        (1, 4095, 132, 1),  # too short
        (500, 100000, 132, 1),
        (0, 100000, 132, 1),  # an empty batch
    ],
)
def test_choice(sequences, tokens, processors, count):
    assert choose_parts(sequences, tokens, processors) == count


def test_choice_with_erase():
    """Three runs forward and one backward; forward alone pays from six parts on."""
    assert choose_parts(64, 65536, 132, erase=True) == 4
    assert choose_parts(64, 65536, 132, erase=True, gradients=False) == 1
    assert choose_parts(44, 65536, 132, erase=True, gradients=False) == 6
