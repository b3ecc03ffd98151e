"""fw-bench end to end at a tiny size: every figure is there, every mistake is a sentence. No timing is asserted."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import re
import shlex
from types import SimpleNamespace

import pytest
import torch
from support.commands import ROOT

from fw_fairseq.ops import RowMap, fast_weight
from fw_fairseq.rules import RULES
from fw_fairseq.tools.bench import __main__ as bench
from fw_fairseq.tools.bench import ops as bench_ops
from fw_fairseq.tools.bench import sparse as bench_sparse
from fw_fairseq.tools.bench.contest import take_turns
from fw_fairseq.tools.plot import style

TINY = [
    "ops",
    "--tokens",
    "40",
    "80",
    "--batch",
    "1",
    "--heads",
    "2",
    "--key-width",
    "8",
    "--value-width",
    "8",
    "--rounds",
    "2",
]


WITHOUT_OPTIONS = {
    "ops": {
        "dtype": "float32", "rules": [name for name in RULES if name != "fwm"], "tokens": [512, 1024, 8192], "batch": 4, "heads": 8,
        "key_width": 64, "value_width": 64, "backend": "auto", "feature_map": None, "dpfp_nu": 1, "no_peers": False,
        "loop_up_to": 512, "softmax_up_to": 1024, "cumsum_up_to": 512,
    },
    "model": {
        "mixers": ["delta"], "layers": 4, "width": 128, "heads": 8, "ffn": 512, "vocabulary": 10000, "tokens": [512, 2048],
        "max_tokens": 2048, "hypotheses": 5, "contexts": [256, 1024, 4096], "steps": 16, "no_decoding_graph": False, "host": False,
        "resume": False,
    },
    "mixers": {
        "width": 128, "heads": 4, "batch": 32, "length": 128, "tokens": 2048, "windows": [4, 1024, 0], "peers": False,
    },
    "sparse": {
        "sizes": ["110M"], "models": [*bench_sparse.MODELS], "contexts": [1, 512, 4096], "try_threads": [1], "type": "fp32",
        "steps": 4, "vocabulary": 32000,
    },
    "translate": {
        "feature_maps": ["elu", "dpfp"], "dpfp_nu": 1, "layers": 3, "width": 256, "heads": 4, "ffn": 512, "vocabulary": 8000,
        "lengths": [30, 200, 1000], "sentences": 8, "beam": 5, "no_decoding_graph": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("command", bench.COMMANDS)
def test_what_is_measured_without_options(command):
    """With these the reports of the pages are made again."""
    found = vars(bench.build_parser().parse_args([command]))
    always = {"command": command, "device": "cpu", "rounds": 7, "threads": torch.get_num_threads(), "json": None, "figure": None}
    assert found == WITHOUT_OPTIONS[command] | always


def test_the_commands_of_the_pages_make_their_reports_again():
    """With the defaults of what they leave out. The number of threads is the machine's, and there are more rules and mixers now."""
    folder, reports = ROOT / "docs" / "results", set()
    text = "\n".join(page.read_text() for page in folder.glob("*.md"))
    for command in re.findall(r"^    fw-bench ((?:.*\\\n)*.*)$", text, re.MULTILINE):
        args = vars(bench.build_parser().parse_args(shlex.split(command.replace("\\\n", " "))))
        if args["json"]:
            before = json.loads((ROOT / args["json"]).read_text())["settings"]
            same = before.keys() & args.keys() - {"rules", "mixers", "threads"}
            assert {name: args[name] for name in same} == {name: before[name] for name in same}, command
            reports.add(ROOT / args["json"])
    kernels = {ROOT / name for name in re.findall(r"^    python recipes/gpu_check/speed\.py (\S+)$", text, re.MULTILINE)}
    assert reports | kernels == {*folder.glob("*.json")}


def test_ops_report(tmp_path, capsys, caplog, monkeypatch):
    outputs = ["--json", str(tmp_path / "ops.json"), "--figure", str(tmp_path / "ops.png")]
    monkeypatch.setattr(logging.getLogger(), "level", logging.DEBUG)  # as the first import of fairseq leaves it
    torch.manual_seed(5)
    bench.main([*TINY, "--rules", "sum", "decay", "--feature-map", "dpfp", *outputs])
    assert not [record for record in caplog.records if record.name.startswith("matplotlib")]
    report = json.loads((tmp_path / "ops.json").read_text())
    timed = {(row["name"], row["tokens"]) for row in report["forward_backward"]}
    peers = {"softmax attention", "cumulative sum", "sum", "decay", "sum step loop", "decay step loop"}
    peers |= {f"{rule} {place} dpfp" for rule in ("sum", "decay") for place in ("with", "after")}
    assert timed == {(name, tokens) for name in peers for tokens in (40, 80)}
    assert all(0 < row["min"] <= row["seconds"] <= row["max"] for row in report["forward_backward"])
    assert {(row["rule"], row["peer"]) for row in report["ratios"]} == {
        (rule, peer)
        for rule in ("sum", "decay")
        for peer in (
            f"{rule} step loop",
            "softmax attention",
            "itself at 40 tokens",
            *(["cumulative sum"] if rule == "sum" else []),
        )
    } | {(f"{rule} with dpfp", f"{rule} after dpfp") for rule in ("sum", "decay")}
    assert [row["rule"] for row in report["memory"]] == ["sum", "decay"]
    assert all(row["times_inputs"] == row["bytes"] / row["input_bytes"] for row in report["memory"])
    assert torch.initial_seed() == 0
    assert {row["name"] for row in report["one_token"]} == {"sum", "decay", "softmax attention"}
    assert (tmp_path / "ops.png").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert "| decay |" in printed and "| decay against step loop |" in printed


@pytest.mark.parametrize(
    "change, message",
    [
        (["--rules", "dleta"], "invalid choice: 'dleta'"),
        (["--rounds", "0"], "0 is not a positive number"),
        (["--json", "no/such/folder/x.json"], "no/such/folder is not a folder"),
        (["--device", "cuda"], "needs a CUDA device"),
    ],
)
def test_mistakes(change, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_:
        bench.main([*TINY, *change])
    assert exit_.value.code == 2 and message in capsys.readouterr().err


def test_inputs_fit_every_rule(monkeypatch):
    class Args:
        device, dtype, batch, heads, key_width, value_width = "cpu", "float32", 1, 2, 4, 3

    for rule in RULES:
        bench_ops.forward_backward(Args, rule, 5, "auto")()


@pytest.mark.parametrize("untimed", [0, 1])
def test_contenders_take_turns(untimed):
    """Each is called once a round; the first rounds do not count."""
    called = []

    def contender(name):
        return lambda: called.append(name) or len(called)

    found = take_turns({"a": contender("a"), "b": contender("b")}, 2, untimed=untimed)
    assert called == ["a", "b"] * (2 + untimed)
    assert found == {"a": [1 + 2 * untimed, 3 + 2 * untimed], "b": [2 + 2 * untimed, 4 + 2 * untimed]}


def sizes(**changed) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_ops.add_arguments(parser)
    parser.set_defaults(device="cpu", rounds=2, threads=1, batch=2, heads=3, key_width=4, value_width=5)
    parser.set_defaults(**changed)
    return parser.parse_args([])


def test_gates_are_drawn_within_the_range_of_uniform_gates():
    q, k, v, gates = bench_ops.draw_inputs(sizes(), "gated_delta", 2000, grad=False)
    assert (q.shape, k.shape, v.shape) == ((2, 3, 2000, 4), (2, 3, 2000, 4), (2, 3, 2000, 5)) and not q.requires_grad
    torch.testing.assert_close(k.norm(dim=-1), torch.ones(2, 3, 2000))
    for gate in gates.values():
        assert gate.min() >= 1 / 64 and gate.max() <= 63 / 64 and gate.min() < 0.02 and gate.max() > 0.98
    for name, gate in bench_ops.draw_inputs(sizes(), "rwkv7", 8)[3].items():
        if RULES["rwkv7"].gates[name].form == "unit":
            torch.testing.assert_close(gate.norm(dim=-1), torch.ones(gate.shape[:-1]))


@pytest.mark.parametrize("feature_map, norm", [("dpfp", "sum"), ("identity", "l2")])
def test_a_feature_map_in_the_operation_and_before_it(feature_map, norm, monkeypatch):
    """Have the same gradients."""
    args, given = sizes(feature_map=feature_map, dpfp_nu=2), []
    assert bench_ops.map_of(args) == RowMap(feature_map, 2, norm)

    def noted(*inputs, feature_map, **options):
        given.append(feature_map)
        return fast_weight(*inputs, feature_map=feature_map, **options)

    monkeypatch.setattr(bench_ops, "fast_weight", noted)
    found = []
    for inside in (True, False):
        torch.manual_seed(0)
        found.append(bench_ops.mapped(args, "delta", 7, inside)())
    assert given == [bench_ops.map_of(args), None]
    torch.testing.assert_close(found[0], found[1])
    calls = bench_ops.build_contenders(args, 7, [])
    for place in ("with", "after"):
        calls[f"{args.rules[0]} {place} {feature_map}"]()
    assert given[2:] == given[:2]


def test_peers_compute_what_their_names_say(monkeypatch):
    """Each is there up to its own length."""
    monkeypatch.setattr(torch, "randn_like", torch.ones_like)
    drawn = bench_ops.draw_inputs(sizes(), "sum", 6)
    monkeypatch.setattr(bench_ops, "draw_inputs", lambda *_, **options: drawn)
    args = sizes(rules=["sum", "gated"], loop_up_to=5, softmax_up_to=6, cumsum_up_to=6)
    calls = bench_ops.build_contenders(args, 6, [])
    assert list(calls) == ["sum", "gated", bench_ops.SOFTMAX, bench_ops.CUMSUM]
    assert list(bench_ops.build_contenders(args, 5, []))[2:4] == ["sum step loop", "gated step loop"]
    assert list(bench_ops.build_contenders(args, 7, [])) == ["sum", "gated"]
    assert bench_ops.CUMSUM not in bench_ops.build_contenders(sizes(rules=["gated"]), 6, [])
    q, k, v, _ = drawn
    seen = torch.ones(6, 6).tril()
    scores = q @ k.transpose(-1, -2)
    weights = (scores / 2).masked_fill(seen == 0, -torch.inf).softmax(-1)  # 2: the root of the width
    for name, y in ((bench_ops.SOFTMAX, weights @ v), (bench_ops.CUMSUM, (scores * seen) @ v)):
        torch.testing.assert_close(calls[name](), torch.autograd.grad(y.sum(), (q, k, v), retain_graph=True))


def test_one_token_reads_one_query(monkeypatch):
    """From an earlier state, and without gradients; of softmax attention with a cache of each length."""
    given = []
    monkeypatch.setattr(bench_ops, "repeated", lambda call, args: given.append(call) or float(len(call())))
    bench_ops.one_token(sizes(rules=["delta"], tokens=[3, 8]))
    assert [call.args[0].shape[2] for call in given] == [1, 1, 1] and [call.args[1].shape[2] for call in given] == [1, 3, 8]
    assert given[0].args[-1] is not None and not any(x.requires_grad for call in given for x in call.args[:3])


def test_memory_is_that_of_forward_and_backward(monkeypatch):
    """Of one call, in a process that has called it before; beside it the bytes of the inputs."""
    happened, grad = [], torch.autograd.grad
    monkeypatch.setattr(torch, "set_num_threads", lambda count: happened.append(("threads", count)))
    monkeypatch.setattr(bench_ops, "forward_backward", lambda args, rule, tokens, _: lambda: happened.append((rule, tokens)))
    monkeypatch.setattr(torch.autograd, "grad", lambda *given: happened.append("grad") or grad(*given))
    monkeypatch.setattr(bench_ops, "peak_beyond", lambda call, device: happened.append(device) or call() or 77)
    inputs = 2 * 3 * 7 * (4 + 4 + 5 + 1) * 4
    assert bench_ops.measure_memory(sizes(threads=3), "delta", 7) == (77, inputs)
    assert happened == [("threads", 3), ("delta", 64), "cpu", "grad"]


def test_memory_is_measured_in_a_process_of_its_own(monkeypatch):
    """On a GPU in this one, since the peak of a GPU's memory starts again with each measurement."""
    happened = []

    pool = SimpleNamespace(apply=lambda call, given: call(*given))
    context = SimpleNamespace(Pool=lambda count: happened.append(count) or contextlib.nullcontext(pool))
    monkeypatch.setattr(bench_ops.multiprocessing, "get_context", lambda method: happened.append(method) or context)
    monkeypatch.setattr(bench_ops, "measure_memory", lambda args, rule, tokens: happened.append((rule, tokens)) or (30, 12))
    monkeypatch.setattr(bench_ops, "progress", happened.append)
    for device in ("cpu", "cuda"):
        found = bench_ops.peak_memory(sizes(device=device), "delta", 7)
        assert found == {"bytes": 30, "input_bytes": 12, "times_inputs": 2.5}
    assert happened == ["memory of delta", "spawn", 1, ("delta", 7), "memory of delta", ("delta", 7)]


def test_the_table_of_a_report():
    """A column for each length, empty where nothing was measured."""
    ratio = {"rule": "sum", "tokens": 8, "peer": "sum step loop", "times_faster": 2.5}
    report = {
        "machine": {"device": "a processor", "threads": 2, "torch": "2.0"},
        "settings": {"dtype": "float32", "batch": 1, "heads": 2, "key_width": 3, "value_width": 4, "rounds": 5, "tokens": [8, 16]},
        "forward_backward": [
            {"name": "sum", "tokens": 8, "seconds": 0.002},
            {"name": "sum", "tokens": 16, "seconds": 0.003},
            {"name": "sum step loop", "tokens": 8, "seconds": 0.005},
        ],
        "ratios": [ratio, {"rule": "sum", "tokens": 16, "peer": "itself at 8 tokens", "times_slower": 1.5}],
        "memory": [{"rule": "sum", "tokens": 16, "bytes": 3e6, "times_inputs": 1.5}],
        "one_token": [{"name": "sum", "tokens": "any", "microseconds": 12.0}],
    }
    assert bench_ops.table(report).splitlines() == [
        "a processor, 2 threads, torch 2.0; float32, B1 H2 K3 V4; medians of 5 rounds",
        "",
        "| forward + backward | T=8, ms | T=16, ms |",
        "|---|---:|---:|",
        "| sum | 2.0 | 3.0 |",
        "| sum step loop | 5.0 |  |",
        "",
        "| times as fast | T=8 |",
        "|---|---:|",
        "| sum against step loop | 2.5 |",
        "",
        "| times the time at the length before | T=16 |",
        "|---|---:|",
        "| sum | 1.5 |",
        "",
        "| peak memory beyond the inputs | T | MB | times the inputs |",
        "|---|---:|---:|---:|",
        "| sum | 16 | 3 | 1.5 |",
        "",
        "| one token | history | us |",
        "|---|---:|---:|",
        "| sum | any | 12 |",
    ]


def test_the_figure_has_milliseconds(monkeypatch):
    """Without what is slow at every length and what has a feature map."""
    names = ("sum", "sum step loop", "cumulative sum", "softmax attention", "sum with dpfp", "sum after dpfp")
    rows = [{"name": name, "tokens": t, "seconds": t / 1e3} for name in names for t in (8, 16)]
    figures = []
    monkeypatch.setattr(style, "save", lambda figure, _: figures.append(figure))
    bench_ops.draw({"forward_backward": rows}, "x.svg")
    [axes] = figures[0].axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[8, 16]] * 2 and axes.get_ylabel() == "forward + backward, ms"
