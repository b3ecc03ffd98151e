"""The referee passes this project's functions, and finds faults that are put into one by hand."""

from __future__ import annotations

import pytest
import torch

from fw_fairseq import fla
from fw_fairseq.conformance import checks, examine, report, table
from fw_fairseq.conformance.__main__ import main
from fw_fairseq.conformance.reference import GATES

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]


def right(q, k, v, g, beta, **given):
    return fla.chunk_gated_delta_rule(q, k, v, g, beta, **given)


def with_one(name, change):
    """The function with one of its arguments changed."""

    def function(q, k, v, **given):
        given |= {"q": q, "k": k, "v": v}
        return right(**given | {name: change(given)})

    return function


def where(condition, fault):
    """The fault where a condition of the arguments holds; right elsewhere."""
    return lambda q, k, v, **given: (fault if condition(q=q, k=k, v=v, **given) else right)(q, k, v, **given)


def resulting(change):
    """The function with another result."""
    return lambda q, k, v, **given: change(*right(q, k, v, **given), q)


def in_place(q, k, v, **given):
    found = right(q, k, v, **given)
    with torch.no_grad():
        v.mul_(2)
    return found


def in_half(q, k, v, **given):
    y, state = right(*(x.bfloat16() for x in (q, k, v)), **given)
    return y.to(q.dtype), state


def in_fp32(q, k, v, **given):
    given = {name: x.float() if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    return tuple(x.to(q.dtype) for x in right(q.float(), k.float(), v.float(), **given))


def packed(**given):
    return given.get("cu_seqlens") is not None


FAULTS = {  # by what is wrong: the check that finds it, and the function
    "the last state is that of the token before": (
        "fp32",
        lambda q, k, v, g, beta, **given: (
            right(q, k, v, g, beta, **given)[0],
            right(*(x[:, :-1] for x in (q, k, v, g, beta)), **given)[1],
        ),
    ),
    "float64 is computed in fp32": ("float64", in_fp32),
    "outputs of bf16 are fp32": ("bf16", resulting(lambda y, state, q: (y.float() if q.dtype == torch.bfloat16 else y, state))),
    "the strength has no gradient": ("gradients", with_one("beta", lambda x: x["beta"].detach())),
    "the first state has no gradient": ("gradients", with_one("initial_state", lambda x: x["initial_state"].detach())),
    "an empty memory is one of ones": (
        "empty memory",
        where(lambda **x: "initial_state" not in x, with_one("initial_state", lambda x: torch.ones(len(x["v"]), 2, 16, 8))),
    ),
    "the scale is not looked at": ("scale", with_one("scale", lambda x: None)),
    "the state of another call is not gone on from": (
        "splits",
        where(lambda **x: x["q"].shape[1] == 63, with_one("initial_state", lambda x: None)),
    ),
    "a single token does not decay": ("tokens", where(lambda **x: x["q"].shape[1] == 1, with_one("g", lambda x: x["g"] * 0))),
    "padding decays": ("padding", with_one("g", lambda x: torch.where((x["k"] == 0).all(-1), -0.1, x["g"]))),
    "packed texts are one": (
        "packing",
        where(packed, lambda q, k, v, cu_seqlens, initial_state, **x: right(q, k, v, initial_state=initial_state[:1], **x)),
    ),
    "packed texts begin empty": ("packing", where(packed, with_one("initial_state", lambda x: x["initial_state"] * 0))),
    "a text's last token is the next one's": (
        "packing",
        where(packed, with_one("cu_seqlens", lambda x: torch.where(x["cu_seqlens"] == 5, 4, x["cu_seqlens"]))),
    ),
    "heads of keys take turns": (
        "grouped heads",
        where(
            lambda q, v, **x: v.shape[2] > q.shape[2],
            lambda q, k, v, **given: right(q.repeat(1, 1, 3, 1), k.repeat(1, 1, 3, 1), v, **given),
        ),
    ),
    "a decay to nothing has a gradient that is no number": ("gates of 0", with_one("g", lambda x: x["g"].exp().log())),
    "strengths end before 1": ("gates of 1", with_one("beta", lambda x: x["beta"].clamp(max=0.999))),
    "an input is changed in place": ("views", in_place),
    "every call is another": ("repeated", resulting(lambda y, state, q: (y * (1 + 1e-6 * torch.rand(())), state))),
    "long texts are kept in bf16": ("long", where(lambda **x: x["q"].shape[1] > 1000, in_half)),
}


def test_every_check_finds_something():
    assert {check for check, _ in FAULTS.values()} == {*checks.CHECKS} and len(FAULTS) >= 10


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault, monkeypatch):
    """By the check that is for them, which the function passes without the fault."""
    name, function = FAULTS[fault]
    monkeypatch.setattr(report, "CHECKS", {name: checks.CHECKS[name]})
    assert examine(right, "gated_delta_rule")[name].passes
    found = examine(function, "gated_delta_rule")[name]
    assert not found.passes and not found.refused
    assert "**" in table({"faulty": {name: found}})


@pytest.mark.cases_in_ci(2)
@pytest.mark.parametrize("rule", sorted(GATES, key=lambda rule: rule != "kda"))
def test_this_projects_functions_pass(rule):
    found = examine(getattr(fla, f"chunk_{rule}"), rule)
    assert {name: str(finding) for name, finding in found.items() if not finding.passes} == {}
    assert ("gates of 0" in found) == bool(GATES[rule]) and ("padding" in found) == (rule != "retention")


def test_command(monkeypatch, capsys):
    """A refusal is no error of the command, and says what it is of."""
    monkeypatch.setattr(report, "CHECKS", {name: checks.CHECKS[name] for name in ("scale", "packing")})
    monkeypatch.setattr(fla, "chunk_kda", where(packed, lambda *args, **given: [][0]), raising=True)
    main(["gated_delta_rule=fw_fairseq.fla:chunk_kda"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].startswith("| check | allowed | fw_fairseq.fla:chunk_kda |")
    assert lines[5].startswith("| scale | 1e-05 | ") and lines[6] == "| packing | 2e-05 | refused |"
    assert lines[8].startswith("fw_fairseq.fla:chunk_kda refused packing (five texts") and "IndexError" in lines[8]
    with pytest.raises(ValueError, match="'kda' is no function; give RULE=MODULE:FUNCTION"):
        main(["kda"])
    with pytest.raises(ValueError, match="rule is 'rule'; allowed: linear_attn"):
        main(["rule=fw_fairseq.fla:chunk_kda"])
