"""Peers of fw-bench: called as their authors say, with the numbers of the same recurrence. A stand-in for the package, no GPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from support.draws import draw_gates, draw_inputs

from fw_fairseq.ops import fast_weight
from fw_fairseq.rules import RULES
from fw_fairseq.tools.bench import ops as bench_ops
from fw_fairseq.tools.bench.peers import FLA, fla_call, running_peers

SHAPE = (2, 3, 7, 4, 5)


@pytest.fixture
def fla(monkeypatch):
    """Kernels that take (B,T,H,D) tensors and logarithms of gates, and answer with the recurrence."""
    calls = []

    def kernel(name, rule):
        def run(q, k, v, scale, g=None, beta=None, **options):
            assert scale == 1.0 and (options == {"normalize": False}) == (rule == "sum")
            calls.append(name)
            first, *rest = (x.transpose(1, 2) for x in (q, k, v))
            gates = {"beta": beta.transpose(1, 2)} if beta is not None else {}
            if g is not None:
                gates |= {"f" if rule == "decay" else "g": g.exp().transpose(1, 2)}
            if rule == "decay":
                gates["z"] = torch.ones_like(rest[1])
            y, state = fast_weight(first, *rest, rule, gates)
            return y.transpose(1, 2), state

        return run

    for rule, (module, name) in FLA.items():
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        setattr(sys.modules[module], name, kernel(name, rule))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    return calls


@pytest.mark.parametrize("rule", FLA)
def test_called_with_its_own_layout(fla, rule):
    inputs, gates = draw_inputs(SHAPE, torch.float32), draw_gates(RULES[rule], SHAPE, torch.float32)
    grads = fla_call(rule, **inputs, gates=gates)()
    assert fla == [FLA[rule][1]]
    assert [g.shape for g in grads[:3]] == [x.transpose(1, 2).shape for x in inputs.values()]


def test_one_that_does_not_run(fla, monkeypatch, capsys):
    """Is left out and named with its error; the others are measured."""
    module, name = FLA["gated"]

    def refuse(*args, **options):
        raise RuntimeError("not with this compiler\nnor with another")

    monkeypatch.setattr(sys.modules[module], name, refuse)
    drawn = []

    def draw(rule):
        drawn.append(rule)
        return *draw_inputs(SHAPE, torch.float32).values(), draw_gates(RULES[rule], SHAPE, torch.float32)

    calls, refused = running_peers(["sum", "gated", "delta"], draw, "cpu")
    assert list(calls) == ["fla chunk_linear_attn", "fla chunk_delta_rule"] and drawn == ["sum", "gated", "delta"]
    assert refused == {"fla chunk_simple_gla": "RuntimeError: not with this compiler"}
    assert capsys.readouterr().err == "fla chunk_simple_gla: not measured: RuntimeError: not with this compiler\n"


def test_report_says_who_was_left_out(monkeypatch):
    """Peers of two lengths, one of them refused at both; ``--no-peers`` asks none."""
    monkeypatch.setattr(bench_ops, "running_peers", lambda rules, draw, device: ({}, {"fla x": "RuntimeError: no"}))
    monkeypatch.setattr(bench_ops, "forward_backward", lambda *args: None)
    args = SimpleNamespace(rules=["delta"], device="meta", no_peers=False, feature_map=None, backend="auto", batch=1, heads=1)
    vars(args).update(key_width=2, value_width=2, dtype="float32", loop_up_to=0, softmax_up_to=0, cumsum_up_to=0)
    refused = []
    for tokens in (4, 8):
        bench_ops.build_contenders(args, tokens, refused)
    assert refused == [{"name": "fla x", "tokens": tokens, "error": "RuntimeError: no"} for tokens in (4, 8)]
    args.no_peers, refused = True, []
    assert list(bench_ops.build_contenders(args, 4, refused)) == ["delta", "delta chunks"] and refused == []


def test_where_there_is_none():
    inputs = draw_inputs(SHAPE, torch.float32)
    assert fla_call("sum", **inputs, gates={}) is None
