"""The step form of every rule against its equation, written out with outer products."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace

import pytest
import torch
from support.definitions import READS, WRITES
from support.draws import draw_gates, draw_inputs

from fw_fairseq.config import FastWeightConfig
from fw_fairseq.mixers import FastWeight
from fw_fairseq.ops import fast_weight
from fw_fairseq.rules import RULES, Coefficients, Gate, Rule
from fw_fairseq.rules.fwm import fwm_step
from fw_fairseq.rules.gates import FORMS, left
from fw_fairseq.tools.convert.conversion import fast_weight_config

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("rule", RULES)
def test_equation(rule):
    assert rule in WRITES, f"the rule {rule} is not tested: write its equation with outer products into WRITES"
    shape = (1, 1, 20, 4, 3)
    inputs, gates = draw_inputs(shape), draw_gates(RULES[rule], shape)
    memory, outputs = torch.zeros(4, 3, dtype=torch.float64), []
    for t in range(20):
        q, k, v = (x[0, 0, t] for x in inputs.values())
        before, now = memory, {n: g[0, 0, t] for n, g in gates.items()}
        memory = WRITES[rule](memory, k, v, **now)
        if rule == "fwm":
            memory = memory / (torch.relu(memory.norm() - 1) + 1)
            read = q @ memory
            outputs.append((read - read.mean()) / (read.var(unbiased=False) + 1e-5).sqrt())
        else:
            outputs.append(READS[rule](before, memory, q, k, v, **now) if rule in READS else q @ memory)
    y, state = fast_weight(**inputs, rule=rule, gates=gates, backend="recurrent")
    torch.testing.assert_close(y[0, 0], torch.stack(outputs))
    torch.testing.assert_close(state.memory[0, 0], memory)


@pytest.mark.parametrize("sizes", [(3, 3, 3, 3), (0.1, 0.1, 0.1, 9)], ids=str)
@pytest.mark.parametrize("reset", [None, 0, 1, 3])
def test_fwm_gradient(reset, sizes):
    """With memories that are divided by their norm, and small ones before; and nothing passes back over the beginning of a text."""
    shape = (1, 2, 4, 3, 4)
    inputs, gates = draw_inputs(shape), draw_gates(RULES["fwm"], shape)
    mask = None if reset is None else torch.arange(4)[None] == reset
    size = torch.tensor(sizes)[:, None]

    def run(q, k, v, beta):
        y, state = fast_weight(q, k, v * size, "fwm", {"beta": beta}, reset_mask=mask)
        return y, state.memory

    assert torch.autograd.gradcheck(run, (*inputs.values(), *gates.values()))


def test_fwm_reads_one_token_in_one_step_and_several_as_a_sequence(monkeypatch):
    called = []
    step, sequence = RULES["fwm"].step, RULES["fwm"].sequence
    noted = {"step": lambda *a, **k: called.append("step") or step(*a, **k)}
    noted["sequence"] = lambda *a, **k: called.append("sequence") or sequence(*a, **k)
    monkeypatch.setitem(RULES, "fwm", replace(RULES["fwm"], **noted))
    for tokens, backend, expected in ((1, "auto", ["step"]), (2, "auto", ["sequence"]), (2, "recurrent", ["step"] * 2)):
        shape = (1, 1, tokens, 4, 3)
        fast_weight(*draw_inputs(shape).values(), "fwm", draw_gates(RULES["fwm"], shape), backend=backend)
        assert called == expected
        called.clear()


def test_delta_replaces_what_is_stored_under_a_key():
    """Two orthonormal keys, the second written again: its value is replaced, the first value stays. A gated write loses both."""
    k = torch.eye(2, dtype=torch.float64)[[0, 1, 1]][None, None]
    v = torch.randn(1, 1, 3, 5, dtype=torch.float64)
    reads = torch.eye(2, dtype=torch.float64)
    _, delta = fast_weight(k, k, v, "delta", {"beta": torch.ones(1, 1, 3, dtype=torch.float64)})
    torch.testing.assert_close(reads @ delta.memory[0, 0], v[0, 0, [0, 2]])
    _, gated = fast_weight(k, k, v, "gated", {"g": torch.full((1, 1, 3), 0.5, dtype=torch.float64)})
    assert not torch.allclose(reads @ gated.memory[0, 0], v[0, 0, [0, 2]])


def test_which_gates_write_and_which_erase():
    """--write-strength-init starts the first, and --negative-eigenvalues doubles the others."""
    both = {rule: ["beta"] for rule in ("delta", "gated_delta", "kda", "comba", "delta_product", "gated_delta_product")}
    for flag, expected in (
        ("writes", both | {"fwm": ["beta"], "mamba2": ["s"], "gdn2": ["w"]}),
        ("erases", both | {"rwkv7": ["c"], "gdn2": ["b"]}),
    ):
        flagged = {name: [gate for gate in rule.gates if getattr(rule.gates[gate], flag)] for name, rule in RULES.items()}
        assert {name: gates for name, gates in flagged.items() if gates} == expected


def test_rules_that_erase_are_known_whatever_their_gates_are_called(monkeypatch):
    erasing = ["delta", "gated_delta", "kda", "gdn2", "comba", "delta_product", "gated_delta_product"]
    assert [name for name, rule in RULES.items() if rule.erases] == erasing
    eta = Rule(equation="", source="", gates={"eta": Gate()}, coefficients=lambda eta: Coefficients(e=eta, w=eta))
    monkeypatch.setitem(RULES, "eta", eta)
    with pytest.raises(ValueError, match="--update-rule eta diverges with keys longer than 1"):
        FastWeight(8, 2, FastWeightConfig(update_rule="eta", feature_map="identity", feature_norm="none"))
    converted = fast_weight_config("eta")
    assert (converted.feature_map, converted.feature_norm) == ("relu", "sum")


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "either coefficients .* or step .*, not both"),
        ({"coefficients": Coefficients, "step": fwm_step}, "either coefficients .* or step .*, not both"),
        ({"coefficients": Coefficients, "key": max, "normaliser": "write"}, "Rule.key is for rules of .* without a normaliser"),
        ({"step": fwm_step, "skip": max}, "Rule.skip is for rules of the recurrence"),
        ({"coefficients": Coefficients, "removal": max, "bonus": max}, "either removal or bonus, not both"),
        ({"coefficients": Coefficients, "normaliser": "values"}, "Rule.normaliser is 'values'; allowed: None, 'write', 'keys'"),
    ],
)
def test_rules_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=message):
        Rule(equation="", source="", **options)


@pytest.mark.parametrize("name", ["z", "w"])
def test_a_normaliser_that_follows_the_writes_has_no_channels(name):
    with pytest.raises(ValueError, match=r"Rule.normaliser is 'write', which has no channels, and z or w differs between"):
        Rule("", "", gates={"x": Gate("V")}, coefficients=lambda x: Coefficients(**{name: x}), normaliser="write")


@pytest.mark.parametrize(
    "form, x, gate",
    [
        ("root16", 0.0, 0.9576033),  # (1/2)^(1/16)
        ("root16", -16.0, 0.3678794),
        ("exponent", 0.0, 0.3678794),
        ("exponent", 4.0, 1.9423376e-24),
        ("exponent", 99.0, 1.8048514e-35),  # exp(-80), the fastest
        ("softplus", 0.0, 0.6931472),
        ("sigmoid", 0.0, 0.5),
        ("identity", -3.0, -3.0),
    ],
)
def test_gates_of_numbers(form, x, gate):
    assert FORMS[form].function(torch.tensor(x)).item() == pytest.approx(gate, rel=1e-5, abs=0)


def test_the_fastest_decay_leaves_something():
    assert left(torch.tensor([0.5, 1e9])).tolist() == pytest.approx([0.6065307, 1.8048514e-35], rel=1e-5, abs=0)


@pytest.mark.parametrize("entry", [Gate(), RULES["gated"]])
def test_entries_cannot_be_changed(entry):
    """All layers of a process share the table."""
    with pytest.raises(FrozenInstanceError):
        setattr(entry, fields(entry)[0].name, None)
    with pytest.raises(FrozenInstanceError):
        entry.other = 1
