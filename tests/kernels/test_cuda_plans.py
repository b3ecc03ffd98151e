"""What is kept between calls of ``fast_weight``: how little a later call does, and that it does what the first one did."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hostcuda import EmulatorLaunch, Recorder
from support.draws import assert_same, draw_gates, draw_inputs, run_with_gradients
from support.emulated import emulated

from fw_fairseq.errors import Mistake
from fw_fairseq.feature_maps import RowMap
from fw_fairseq.ops import FastWeightState, fast_weight
from fw_fairseq.ops.kernels import launch, parameters
from fw_fairseq.ops.kernels.compiler import Launcher
from fw_fairseq.ops.kernels.decay import STRUCTURE
from fw_fairseq.rules import RULES, Coefficients

SHAPE = (1, 2, 37, 16, 16)
BF16, FP32 = torch.bfloat16, torch.float32
DIVIDED, MAPPED = {"attention_norm": True}, {"feature_map": RowMap("elu", 1, "sum")}
ONE_LAUNCH = ["sum", "gated", "delta", "gated_delta", "decay", "retnet", "gla", "mamba2", "hgrn2", "kda", "gdn2"]
COUNTED = [*((rule, {}) for rule in ONE_LAUNCH), ("sum", DIVIDED), ("gated", DIVIDED), ("delta", MAPPED), ("decay", MAPPED)]
ENVIRONMENT = 5  # calls in which Python looks up FW_FAIRSEQ_FP32


class Stub(Launcher):
    """Starts nothing."""

    device_type = "cpu"

    def why_not(self, device):
        return None

    def capability(self, device):
        return (9, 0)

    def processors(self, device):
        return 132

    def prepare(self, *kernel):
        return lambda packed: None


def counted(function):
    """Its result, and the number of calls of functions that Python made for it."""
    events: Counter[str] = Counter()
    sys.setprofile(lambda frame, event, argument: events.update([event]))
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return result, events["call"] + events["c_call"] - 1  # but the one that ends it


@pytest.mark.parametrize("dtype, more", [(BF16, 0), (FP32, ENVIRONMENT)])
@pytest.mark.parametrize("rule, options", COUNTED)
def test_calls_of_functions(rule, options, dtype, more):
    """At most 90 forward and 220 with backward, whatever the computer; but for those of ``autograd.backward`` itself, which a
    training step has once."""
    inputs = draw_inputs(SHAPE, dtype, positive=True)
    gates = draw_gates(RULES[rule], SHAPE, FP32)
    dy = torch.ones_like(inputs["v"])

    def forward():
        return fast_weight(**inputs, rule=rule, gates=gates, **options)[0]

    with launch.use(Stub()):
        forward().backward(dy)
        y, ahead = counted(forward)
        _, back = counted(lambda: y.backward(dy))
        with torch.no_grad():
            forward()
            _, without = counted(forward)
    plain = torch.zeros_like(dy, requires_grad=True).neg()
    _, own = counted(lambda: plain.backward(dy))
    assert without < ahead <= 90 + more and ahead + back - own <= 220 + more, (without, ahead, back - own)


def results(inputs, gates, rule, state=None, **options):
    leaves = inputs | gates
    return run_with_gradients(leaves, lambda: fast_weight(**inputs, rule=rule, gates=gates, state=state, **options))


@pytest.mark.cases_in_ci(4)
@pytest.mark.parametrize(
    "rule, options",
    [("sum", {}), ("gated", DIVIDED), ("kda", MAPPED), ("decay", {}), ("sum", DIVIDED), *((rule, {}) for rule in ONE_LAUNCH[1:])],
)
def test_no_memory_is_one_of_zeros(emulate, rule, options):
    """Bit for bit, at the first call and later ones; and chunks agree."""
    emulate()
    inputs, gates = draw_inputs(SHAPE, FP32, positive=True), draw_gates(RULES[rule], SHAPE, FP32)
    zeros = FastWeightState(torch.zeros(1, 2, 16, 16), torch.zeros(1, 2, 16) if options == DIVIDED else None)
    first, second = results(inputs, gates, rule, **options), results(inputs, gates, rule, **options)
    given = results(inputs, gates, rule, zeros, **options)
    for name, x in first.items():
        assert torch.equal(x, second[name]) and torch.equal(x, given[name]), name
    assert_same(first, results(inputs, gates, rule, backend="chunkwise", **options), 1e-3)


def test_the_state_of_a_later_call_goes_on(emulate):
    """With a gradient of its memory, also where that lies elsewhere in the device's memory."""
    emulate()
    inputs, gates = draw_inputs(SHAPE, FP32), draw_gates(RULES["gated_delta"], SHAPE, FP32)

    def run(memory, backend):
        call = dict(rule="gated_delta", gates=gates, state=FastWeightState(memory), backend=backend)
        return run_with_gradients(inputs | gates | {"memory before": memory}, lambda: fast_weight(**inputs, **call))

    for memory in (torch.randn(1, 2, 16, 16), torch.randn(1, 2, 16, 16).mT):
        memory.requires_grad_()
        assert_same(run(memory, "cuda"), run(memory, "chunkwise"), 1e-4)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "rule, options",
    [*((rule, {}) for rule in ("sum", "delta", "decay", "kda")), ("gated", DIVIDED), ("delta", DIVIDED)],
)
def test_memories_that_nobody_needs_are_neither_written_nor_read(rule, options, padded):
    """The one after the last token, and one of zeros before the first."""
    inputs, gates = draw_inputs(SHAPE, FP32, positive=True), draw_gates(RULES[rule], SHAPE, FP32)
    mask = torch.arange(37).expand(1, 37) >= 30 if padded else None
    call = dict(**inputs, rule=rule, gates=gates, padding_mask=mask, **options)
    with launch.use(Recorder()) as recorder:
        assert fast_weight(**call, keep_state=False)[1] is None
        last, final = recorder.taken()[-1], "final_memory" if rule == "decay" else "final"
        kind = STRUCTURE.dtype if rule == "decay" else parameters.PARAMS
        assert {name: int(np.frombuffer(last.params, kind)[0][name]) for name in ("memory", final)} == {"memory": 0, final: 0}
    with emulated(EmulatorLaunch()):
        y, state = fast_weight(**call)
        assert fast_weight(**call, keep_state=False)[0].equal(y) and (state.memory != 0).any()


def defines(recorder) -> dict:
    return recorder.taken()[-1].defines


def test_addresses_and_strides_of_later_tensors():
    """They are of the same shape and type, and can or cannot be moved 16 bytes at a time."""
    whole = torch.rand(2 * 2 * 40 * 16 + 8).to(BF16)
    at = lambda start, token=16: whole.as_strided((1, 2, 37, 16), (2 * 40 * 16, 40 * 16, token, 1), start)  # noqa: E731
    with launch.use(Recorder()) as recorder:
        for start, token, aligned in ((0, 16, 1), (1, 16, 0), (8, 16, 1), (0, 17, 0), (0, 16, 1)):
            x = at(start, token)
            fast_weight(x, x, x, "sum")
            assert defines(recorder)["FW_ALIGNED"] == aligned


def test_gradients_of_a_later_call():
    """They are kept where a gradient may be asked for."""
    inputs = draw_inputs(SHAPE, BF16)
    with launch.use(Recorder()) as recorder:
        for needed, enabled in ((True, True), (True, False), (False, True), (True, True)):
            leaves = {name: x.detach().requires_grad_(needed) for name, x in inputs.items()}
            with torch.set_grad_enabled(enabled):
                y, _ = fast_weight(**leaves, rule="sum")
            assert y.requires_grad == (needed and enabled)
        borders = [bool(numbers(call)["borders"]) for call in recorder.taken()]
    assert borders == [True, False, False, True]


def numbers(call) -> dict:
    return np.frombuffer(call.params, parameters.PARAMS)[0]


def test_gates_of_another_type_and_autocast():
    """Gates are in fp32 before the rule computes with them."""
    inputs, g = draw_inputs(SHAPE, BF16), torch.rand(1, 2, 37)
    with launch.use(Recorder()) as recorder:
        for gate in (g, g.to(BF16), g):
            for autocast in (False, True):
                with torch.autocast("cpu", BF16, enabled=autocast):
                    fast_weight(**inputs, rule="gated", gates={"g": gate})
                assert defines(recorder)["FW_F"] == 1
    seen = []
    rule = replace(RULES["gated"], coefficients=lambda g: (seen.append(g.dtype), Coefficients(f=g, w=1 - g))[1])
    seen.clear()
    RULES["seen"] = rule
    try:
        with launch.use(Recorder()):
            for gate in (g.to(BF16), g, g.to(BF16)):
                fast_weight(**inputs, rule="seen", gates={"g": gate})
    finally:
        del RULES["seen"]
    assert seen and set(seen) == {FP32}


def test_a_rule_that_is_replaced(monkeypatch):
    inputs, gates = draw_inputs(SHAPE, FP32), {"g": torch.rand(1, 2, 37)}
    with launch.use(Recorder()) as recorder:
        fast_weight(**inputs, rule="gated", gates=gates)
        assert defines(recorder)["FW_W"] == 1
        monkeypatch.setitem(RULES, "gated", replace(RULES["gated"], coefficients=lambda g: Coefficients(f=g)))
        fast_weight(**inputs, rule="gated", gates=gates)
        assert defines(recorder)["FW_W"] == 0


def test_masks_and_wrong_arguments_after_right_ones(emulate):
    """A plan is for calls of one kind: others are checked, and masked where they are."""
    launcher = emulate()
    inputs, gates = draw_inputs(SHAPE, FP32), draw_gates(RULES["gated"], SHAPE, FP32)
    call = dict(rule="gated", gates=gates)
    fast_weight(**inputs, **call)
    for wrong, message in (
        (dict(gates={}), "gates has none"),
        (dict(gates={"g": gates["g"][:, :, 1:]}), "gates\\['g'\\] has shape"),
        (dict(k=inputs["k"][..., 1:]), "k has shape"),
        (dict(v=inputs["v"].to(BF16)), "v is torch.bfloat16"),
        (dict(attention_norm_of="read"), "attention_norm_of is 'read'"),
        (dict(backend=["cuda"]), "backend is a list"),
        (dict(state=FastWeightState(torch.zeros(1, 2, 16, 15))), "state.memory has shape"),
        (dict(padding_mask=torch.zeros(1, 36, dtype=torch.bool)), "padding_mask is"),
    ):
        with pytest.raises(Mistake, match=message):
            fast_weight(**inputs | call | wrong)
    mask = torch.rand(1, 37) < 0.3
    for masks in (dict(padding_mask=mask), dict(reset_mask=mask), {}):
        for _ in range(2):
            ours, theirs = (results(inputs, gates, "gated", **masks, backend=backend) for backend in ("cuda", "chunkwise"))
            assert_same(ours, theirs, 1e-4)
    assert launcher.calls
