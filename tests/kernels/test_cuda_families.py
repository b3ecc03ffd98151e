"""Which kernel family computes which coefficients, and what no family computes."""

from __future__ import annotations

import logging

import pytest
import torch
from hostcuda import Recorder
from support.cuda_scan import by_family
from support.draws import assert_same
from support.emulated import emulated
from support.kernel_rules import CHANNEL_RULES, KERNEL_RULES, STEP_RULES, coefficients_of

from fw_fairseq.ops import fast_weight
from fw_fairseq.ops.kernels import launch, recurrence, step
from fw_fairseq.ops.kernels.family import Family, Operands
from fw_fairseq.ops.recurrent import step_form
from fw_fairseq.rules import RULES, Coefficients, Gate, Rule

FAMILY = {"sum": "linear", "gated": "linear", "decay": "decay", "delta": "delta", "gated_delta": "delta"}
T, X = (1, 2, 19), (1, 2, 19, 4)  # a coefficient per token, per channel


def test_shared_memory_of_devices():
    """The most that a block may have, in KiB, by compute capability, as the programming guide has it."""
    guide = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227, (12, 0): 99}
    assert {device: launch.SHARED_MORE.get(device, launch.SHARED) for device in guide} == {k: 1024 * x for k, x in guide.items()}


@pytest.mark.parametrize("rule, name", FAMILY.items())
def test_the_family_of_each_rule(rule, name):
    assert recurrence.find_family(coefficients_of(rule)) == name
    assert rule in KERNEL_RULES and rule in STEP_RULES


@pytest.mark.parametrize("rule", CHANNEL_RULES)
def test_the_family_of_decay_per_channel_with_erase(rule):
    f, _, e, _ = coefficients_of(rule)
    e = f if e is None else e  # the key of a removal
    assert recurrence.find_family(Coefficients(f=f, e=e)) == "channel_delta"


def given(**shapes) -> Coefficients:
    return Coefficients(**{name: torch.rand(shape) for name, shape in shapes.items()})


@pytest.mark.parametrize(
    "shapes, said",
    [
        (dict(z=X, e=T), "z per channel, e per token"),
        (dict(f=X, z=X, e=T), "f per channel, z per channel, e per token"),
        (dict(e=X), "e per channel"),
        (dict(f=T, w=X), "f per token, w per channel"),
        (dict(f=(1, 2, 19, 4, 4)), "f of 5 dimensions"),
    ],
)
def test_what_no_family_computes(emulate, shapes, said):
    emulate()
    q, memory = torch.randn(X), torch.zeros(1, 2, 4, 4)
    _, reason = recurrence.choose_family(Operands(q, q, q, *given(**shapes), memory))
    assert reason.startswith(f"backend='cuda' has no kernel for {said} together; its families compute linear: f per token, ")


@pytest.mark.parametrize("dtype, number", [(torch.bfloat16, 0), (torch.float16, 1), (torch.float32, 2)])
@pytest.mark.parametrize("shapes", [{}, dict(f=X), dict(e=T), dict(f=X, e=T)])
def test_products_are_as_exact_as_the_inputs(dtype, number, shapes):
    """fp16 is multiplied in fp16 where no channel decays, else in tf32, which holds it and a wider range; the numbers are those of
    cuda/tile.cuh."""
    if dtype == torch.float16 and "f" not in shapes:
        number = 3
    rows, memory = (torch.randn(X).to(dtype).requires_grad_() for _ in range(3)), torch.zeros(1, 2, 4, 4)
    with emulated(Recorder()) as recorder:
        by_family(*rows, given(**shapes), memory)[0].sum().backward()
    assert [launched.defines["FW_PRECISION"] for launched in recorder.launches] == [number] * 2


@pytest.mark.parametrize("shapes, said", [(dict(w=X), "w per channel"), (dict(z=T, w=X), "z per token, w per channel")])
def test_what_the_decoding_kernel_does_not_compute(emulate, shapes, said):
    emulate()
    q = torch.randn(X)
    assert step.why_not(q, q, given(**shapes)).startswith(f"the decoding kernel does not compute {said}, only f per token, ")


@pytest.fixture
def both_sides(monkeypatch):
    """A rule of a new shape: decay per value channel with an erase."""
    gates = {"a": Gate("V"), "beta": Gate()}
    rule = Rule("", "", coefficients=lambda a, beta: Coefficients(z=a, e=beta, w=beta), gates=gates)
    monkeypatch.setitem(RULES, "both_sides", rule)
    launch.log_once.cache_clear()
    q, k, v = (torch.randn(X) for _ in range(3))
    inputs = {"q": q, "k": torch.nn.functional.normalize(k, dim=-1), "v": v, "a": torch.rand(X), "beta": torch.rand(T)}
    return {name: x.requires_grad_() for name, x in inputs.items()}


def results(leaves, backend: str) -> dict[str, torch.Tensor]:
    y, state = fast_weight(*list(leaves.values())[:3], "both_sides", {n: leaves[n] for n in ("a", "beta")}, backend=backend)
    grads = torch.autograd.grad(y.square().sum() + state.memory.sum(), list(leaves.values()))
    return {"y": y.detach(), "memory": state.memory.detach()} | dict(zip(leaves, grads))


def test_a_rule_of_a_new_shape_runs_in_pytorch(emulate, both_sides, caplog):
    launcher = emulate()
    with caplog.at_level(logging.WARNING):
        assert_same(results(both_sides, "auto"), results(both_sides, "recurrent"), 1e-4)
    assert not launcher.calls and [r.message.count("z per channel, e per token, w per token together") for r in caplog.records] == [
        1
    ]
    with pytest.raises(ValueError, match=r"^backend='cuda' has no kernel for z per channel, e per token, w per token together"):
        results(both_sides, "cuda")


def test_a_family_is_one_entry(emulate, both_sides, monkeypatch):
    """A registered family gets what it says it computes, forward and backward; the other rules keep theirs."""
    emulate()
    seen = []

    def forward(launcher, x, keep):
        seen.append("forward")
        y, memory = step_form(*x[:3], Coefficients(*x[3:7]), x.q.new_zeros(x.memory_shape))
        return y, memory.contiguous(), ()

    def backward(launcher, x, saved, dy, dmemory):
        seen.append("backward")
        assert x.memory is None  # an empty one, which has no gradient
        inputs = [None if part is None else part.detach().requires_grad_() for part in x[:7]]
        with torch.enable_grad():
            outputs = step_form(*inputs[:3], Coefficients(*inputs[3:]), x.q.new_zeros(x.memory_shape))
            grads = iter(torch.autograd.grad(outputs, [x for x in inputs if x is not None], (dy, dmemory)))
        return [*(None if x is None else next(grads) for x in inputs), None]

    computes, needs = ("z per channel", "e per token", "w per token"), ("z per channel", "e per token")
    family = Family(computes, needs, lambda x: None, lambda x: [], forward, backward)
    monkeypatch.setitem(recurrence.FAMILIES, "both_sides", family)
    assert_same(results(both_sides, "cuda"), results(both_sides, "recurrent"), 1e-4)
    assert seen == ["forward", "backward"]
    for rule, name in FAMILY.items():
        assert recurrence.find_family(coefficients_of(rule)) == name
