"""fw-bench end to end at a tiny size: every figure is there, every mistake is a sentence. No timing is asserted."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fw_fairseq.mixers import MIXERS
from fw_fairseq.ops import RowMap, fast_weight
from fw_fairseq.rules import RULES
from fw_fairseq.tools.bench import __main__ as bench
from fw_fairseq.tools.bench import contest, language_models, measure, recurrent_models
from fw_fairseq.tools.bench import ops as bench_ops

OPS = ["ops", "--tokens", "40", "80", "--batch", "1", "--heads", "2", "--key-width", "8", "--value-width", "8", "--rounds", "2"]
MODEL = ["model", "--layers", "1", "--width", "16", "--heads", "2", "--ffn", "16", "--vocabulary", "20"]
TINY_MODEL = [*MODEL, *["--tokens", "8", "2048", "--max-tokens", "64", "--contexts", "8", "32", "--steps", "2", "--rounds", "1"]]
NAMES = {"fast_weight_lm delta", "fast_weight_lm sru", "transformer_lm"}


WITHOUT_OPTIONS = {
    "ops": {
        "dtype": "float32", "rules": [name for name in RULES if name != "fwm"], "tokens": [512, 1024, 8192], "batch": 4, "heads": 8,
        "key_width": 64, "value_width": 64, "backend": "auto", "feature_map": None, "dpfp_nu": 1, "no_peers": False,
        "loop_up_to": 512, "softmax_up_to": 1024, "cumsum_up_to": 512,
    },
    "model": {
        "mixers": ["delta"], "layers": 4, "width": 128, "heads": 8, "ffn": 512, "vocabulary": 10000, "tokens": [512, 2048],
        "max_tokens": 2048, "hypotheses": 5, "contexts": [256, 1024, 4096], "steps": 16, "no_decoding_graph": False,
        "resume": False,
    },
    "transformers": {
        "models": None, "layers": 4, "width": 256, "heads": 4, "vocabulary": 1000, "batch": 1, "tokens": 512, "steps": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize("command", bench.COMMANDS)
def test_what_is_measured_without_options(command):
    """With these the reports of the pages are made again."""
    found = vars(bench.build_parser().parse_args([command]))
    always = {"command": command, "device": "cpu", "rounds": 7, "threads": torch.get_num_threads(), "json": None, "figure": None}
    assert found == WITHOUT_OPTIONS[command] | always


def test_ops_report(tmp_path, capsys, caplog, monkeypatch):
    outputs = ["--json", str(tmp_path / "ops.json"), "--figure", str(tmp_path / "ops.png")]
    monkeypatch.setattr(logging.getLogger(), "level", logging.DEBUG)  # as the first import of fairseq leaves it
    torch.manual_seed(5)
    bench.main([*OPS, "--rules", "sum", "--feature-map", "dpfp", *outputs])
    assert not [record for record in caplog.records if record.name.startswith("matplotlib")]
    report = json.loads((tmp_path / "ops.json").read_text())
    timed = {(row["name"], row["tokens"]) for row in report["forward_backward"]}
    peers = {"softmax attention", "cumulative sum", "sum", "sum step loop", "sum with dpfp", "sum after dpfp"}
    assert timed == {(name, tokens) for name in peers for tokens in (40, 80)}
    assert all(0 < row["min"] <= row["seconds"] <= row["max"] for row in report["forward_backward"])
    against = {("sum", peer) for peer in ("sum step loop", "softmax attention", "itself at 40 tokens", "cumulative sum")}
    assert {(row["rule"], row["peer"]) for row in report["ratios"]} == against | {("sum with dpfp", "sum after dpfp")}
    [memory] = report["memory"]
    assert memory["rule"] == "sum" and memory["times_inputs"] == memory["bytes"] / memory["input_bytes"]
    assert torch.initial_seed() == 0
    assert {row["name"] for row in report["one_token"]} == {"sum", "softmax attention"}
    assert (tmp_path / "ops.png").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert "| sum |" in printed and "| sum against step loop |" in printed


@pytest.mark.long
def test_model_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    files = ["--json", str(tmp_path / "model.json"), "--figure", str(tmp_path / "model.png")]
    bench.main([*TINY_MODEL, "--mixers", "delta", "sru", *files])
    report = json.loads((tmp_path / "model.json").read_text())
    assert {row["name"] for row in report["parameters"]} == NAMES
    assert {(row["name"], row["tokens"]) for row in report["training"]} == {(n, t) for n in NAMES for t in (8, 2048)}
    assert {(row["name"], row["context"]) for row in report["generation"]} == {(n, c) for n in NAMES for c in (8, 32)}
    assert all(0 < row["min"] <= row["seconds"] <= row["max"] for row in report["training"] + report["generation"])
    state = {name: [row["state_bytes"] for row in report["generation"] if row["name"] == name] for name in NAMES}
    keys_and_values = 2 * 16 * 4 * 5  # 5 hypotheses
    assert state.pop("transformer_lm") == [keys_and_values * context for context in (8, 32)]
    assert all(sizes[0] > 0 and len(set(sizes)) == 1 for sizes in state.values())
    assert len(report["ratios"]) == 2 * (2 + 2)
    for row in report["training"]:
        assert row["tokens_per_second"] == pytest.approx(max(64, row["tokens"]) / row["seconds"])
    parameters = {row["name"]: row["parameters"] for row in report["parameters"]}
    assert parameters["transformer_lm"] == 20 * 16 + 4 * (16 * 16 + 16) + 2 * (16 * 16 + 16) + 3 * 2 * 16  # one matrix for words
    peak = {(row["name"], row["tokens"]): row["peak_bytes"] for row in report["training"]}
    assert (
        2048**2 * 4 > peak["transformer_lm", 2048] > peak["transformer_lm", 8] >= 0
    )  # it has no mask, which alone would be so large
    assert all(peak[name, 2048] > peak[name, 8] for name in NAMES)
    assert (tmp_path / "model.png").stat().st_size > 1000
    printed, progress = capsys.readouterr()
    assert "| transformer_lm | " in printed and f"| {keys_and_values * 8 / 1e3:.0f} |" in printed
    said = [f"memory of {name}, {tokens} tokens" for name in NAMES for tokens in (8, 2048)]
    assert all(f"\r\033[K{part}" in progress for part in [*said, "training, 8 tokens, round 1 of 1"])

    report["training"] = [row for row in report["training"] if row["tokens"] == 8]
    report["settings"]["host"] = False  # as in an older report
    (tmp_path / "model.json").write_text(json.dumps(report))
    bench.main([*TINY_MODEL, "--mixers", "delta", "sru", *files, "--resume"])
    resumed = json.loads((tmp_path / "model.json").read_text())
    assert resumed["generation"] == report["generation"] and resumed["training"][: len(NAMES)] == report["training"]
    assert {row["tokens"] for row in resumed["training"][len(NAMES) :]} == {2048}
    with pytest.raises(SystemExit, match=r"model.json was measured with mixers \['delta', 'sru'\], not \['delta'\]"):
        bench.main([*TINY_MODEL, *files, "--resume"])


@pytest.mark.parametrize(
    "command, change, message",
    [
        (OPS, ["--rules", "dleta"], "invalid choice: 'dleta'"),
        (OPS, ["--rounds", "0"], "0 is not a positive number"),
        (OPS, ["--device", "cuda"], "needs a CUDA device"),
        (MODEL, ["--mixers", "dleta"], "invalid choice: 'dleta'"),
        (MODEL, ["--vocabulary", "4"], "4 leaves no room beside fairseq's 4 special symbols"),
    ],
)
def test_mistakes(command, change, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_:
        bench.main([*command, *change])
    assert exit_.value.code == 2 and message in capsys.readouterr().err


def test_transformers_report(tmp_path, capsys, monkeypatch):
    """Each model and each function, in both ways; afterwards transformers computes as before."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(recurrent_models, "FUNCTION_HEAD", 8)
    options = ["--models", "mamba2", "olmo_hybrid", "--layers", "2", "--width", "16", "--heads", "2", "--vocabulary", "20"]
    files = ["--json", str(tmp_path / "x.json"), "--figure", str(tmp_path / "x.png")]
    bench.main(["transformers", *options, "--tokens", "20", "--steps", "3", "--rounds", "1", *files])
    report = json.loads((tmp_path / "x.json").read_text())
    assert [(row["name"], row["what"]) for row in report["models"]] == [
        (name, what) for name in ("mamba2", "olmo_hybrid") for what in ("forward", "training step", "generated token")
    ]
    assert {row["name"] for row in report["functions"]} == {*recurrent_models.REPLACED}
    for row in report["models"] + report["functions"]:
        assert row["times_faster"] == pytest.approx(row["reference"]["seconds"] / row["seconds"])
    printed = capsys.readouterr().out
    assert "| mamba2 | " in printed and "| chunk_kda | " in printed and (tmp_path / "x.png").stat().st_size > 1000
    module = importlib.import_module("transformers.models.olmo_hybrid.modeling_olmo_hybrid")
    assert not hasattr(module.torch_chunk_gated_delta_rule, "replaces")
    with pytest.raises(SystemExit, match=r"--models has mambo, which is no model that accelerate\(\) knows; it knows "):
        bench.main(["transformers", "--models", "mambo"])


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

    found = contest.take_turns({"a": contender("a"), "b": contender("b")}, 2, untimed=untimed)
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
    args, given, row_map = sizes(feature_map=feature_map, dpfp_nu=2), [], RowMap(feature_map, 2, norm)

    def noted(*inputs, feature_map, **options):
        given.append(feature_map)
        return fast_weight(*inputs, feature_map=feature_map, **options)

    monkeypatch.setattr(bench_ops, "fast_weight", noted)
    found = []
    for inside in (True, False):
        torch.manual_seed(0)
        found.append(bench_ops._mapped(args, "delta", 7, inside)())
    assert given == [row_map, None]
    torch.testing.assert_close(found[0], found[1])
    calls = bench_ops._contenders(args, 7, [])
    for place in ("with", "after"):
        calls[f"{args.rules[0]} {place} {feature_map}"]()
    assert given[2:] == given[:2]


def test_peers_compute_what_their_names_say(monkeypatch):
    """Each is there up to its own length."""
    monkeypatch.setattr(torch, "randn_like", torch.ones_like)
    drawn = bench_ops.draw_inputs(sizes(), "sum", 6)
    monkeypatch.setattr(bench_ops, "draw_inputs", lambda *_, **options: drawn)
    args = sizes(rules=["sum", "gated"], loop_up_to=5, softmax_up_to=6, cumsum_up_to=6)
    calls = bench_ops._contenders(args, 6, [])
    assert list(calls) == ["sum", "gated", bench_ops.SOFTMAX, bench_ops.CUMSUM]
    assert list(bench_ops._contenders(args, 5, []))[2:4] == ["sum step loop", "gated step loop"]
    assert list(bench_ops._contenders(args, 7, [])) == ["sum", "gated"]
    assert bench_ops.CUMSUM not in bench_ops._contenders(sizes(rules=["gated"]), 6, [])
    q, k, v, _ = drawn
    seen = torch.ones(6, 6).tril()
    scores = q @ k.transpose(-1, -2)
    weights = (scores / 2).masked_fill(seen == 0, -torch.inf).softmax(-1)  # 2: the root of the width
    for name, y in ((bench_ops.SOFTMAX, weights @ v), (bench_ops.CUMSUM, (scores * seen) @ v)):
        torch.testing.assert_close(calls[name](), torch.autograd.grad(y.sum(), (q, k, v), retain_graph=True))


def test_one_token_reads_one_query(monkeypatch):
    """From an earlier state, and without gradients; of softmax attention with a cache of each length."""
    given = []
    monkeypatch.setattr(bench_ops, "_microseconds", lambda call, args: given.append(call) or float(len(call())))
    bench_ops._one_token(sizes(rules=["delta"], tokens=[3, 8]))
    assert [call.args[0].shape[2] for call in given] == [1, 1, 1] and [call.args[1].shape[2] for call in given] == [1, 3, 8]
    assert given[0].args[-1] is not None and not any(x.requires_grad for call in given for x in call.args[:3])


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


@pytest.mark.parametrize("name", ["fast_weight_lm delta", "transformer_lm"])
def test_positions_suffice_for_the_longest_context(name):
    sizes = {"layers": 1, "width": 8, "heads": 2, "ffn": 8, "vocabulary": 20, "device": "cpu", "no_decoding_graph": False}
    args = SimpleNamespace(tokens=[4], contexts=[5, 30], steps=2, **sizes)
    model = measure.build_model(args, name)
    assert model.max_decoder_positions() == 32 + measure.UNTIMED_STEPS


def test_each_token_after_the_context_is_timed_once(monkeypatch):
    """The first of them warm up; each starts from the same state, which is not changed."""
    given, lengths = {"layer": {"memory": 3}}, []

    def decoder(tokens, incremental_state):
        lengths.append(tokens.shape[1])
        incremental_state["layer"]["memory"] += 1

    def seconds(call, device):
        call()
        return float(lengths[-1])

    monkeypatch.setattr(measure, "timed", seconds)
    model, text = SimpleNamespace(decoder=decoder), torch.zeros(1, 9 + measure.UNTIMED_STEPS)
    assert measure.time_steps(SimpleNamespace(device="cpu"), model, text, 4, given) == 5 + measure.UNTIMED_STEPS + 2
    assert lengths == [*range(5, 10 + measure.UNTIMED_STEPS)] and given == {"layer": {"memory": 3}}


def test_the_table_of_a_report_of_models():
    """A table for each number, a column for each length, with ratios in brackets."""
    m, s = {"device": "a processor", "threads": 2, "torch": "2.0"}, {"layers": 2, "width": 16, "heads": 4, "ffn": 32, "rounds": 3}
    s |= {"vocabulary": 20, "max_tokens": 64, "steps": 5, "hypotheses": 6}
    names = ("own", "transformer_lm")
    ratio = {"name": "own", "times_faster": 10.0, "times_smaller": 2.5}
    report = {
        "machine": m,
        "settings": s,
        "generation": [{"name": n, "context": t, "seconds": t / 1e3, "state_bytes": t * 2e3} for n in names for t in (1, 7)],
        "training": [{"name": n, "tokens": 8, "tokens_per_second": 900.0, "peak_bytes": 3e6} for n in names],
        "ratios": [ratio | {"what": "generation", "tokens": 7}, ratio | {"what": "training", "tokens": 8}],
        "parameters": [{"name": n, "parameters": 1_234_567} for n in names],
    }
    assert language_models.table(report).splitlines() == [
        "a processor, 2 threads, torch 2.0; 2 layers, width 16, 4 heads, ffn 32, 20 words; training with 64 tokens a batch,"
        " generation of 5 tokens for 6 hypotheses; medians of 3 rounds; in brackets: times as fast, or as small, as transformer_lm",
        "",
        "| generation, ms per token | after 1 tokens | after 7 tokens |",
        "|---|---:|---:|",
        "| own | 1.00 | 7.00 (10 x) |",
        "| transformer_lm | 1.00 | 7.00 |",
        "",
        "| generation, state in kB | after 1 tokens | after 7 tokens |",
        "|---|---:|---:|",
        "| own | 2 | 14 (2.50 x) |",
        "| transformer_lm | 2 | 14 |",
        "",
        "| training, tokens/s | 8 tokens |",
        "|---|---:|",
        "| own | 900 (10 x) |",
        "| transformer_lm | 900 |",
        "",
        "| training, peak memory in MB | 8 tokens |",
        "|---|---:|",
        "| own | 3 (2.50 x) |",
        "| transformer_lm | 3 |",
        "",
        "| model | parameters |",
        "|---|---:|",
        "| own | 1,234,567 |",
        "| transformer_lm | 1,234,567 |",
    ]


def test_ratios_to_the_transformer():
    """A state of no bytes counts as one."""
    rows = language_models._ratios(
        "training", 8, {"a": [2.0], "b": [1.0], "transformer_lm": [6.0]}, {"a": 4, "b": 0, "transformer_lm": 12}
    )
    assert [(row["times_faster"], row["times_smaller"]) for row in rows] == [(3, 3), (6, 12)]


def test_a_report_is_continued_only_where_it_is_asked_for(tmp_path):
    """A switch that one of both does not have yet, or any more, is off."""
    file = tmp_path / "x.json"
    args = SimpleNamespace(device="cpu", threads=1, resume=True, json=file, steps=2)
    assert language_models._begin(args)["training"] == []
    before = {"settings": {"device": "cpu", "threads": 1, "steps": 2, "older": False}}
    before |= {"training": [{"tokens": 8, "name": "kept"}], "generation": [], "ratios": []}
    file.write_text(json.dumps(before))
    assert language_models._begin(args).items() >= before.items()
    args.resume = False
    assert language_models._begin(args)["training"] == []
    language_models._finish_length(args, {"a": 1}, "a length")
    assert json.loads(file.read_text()) == {"a": 1}


def test_what_is_measured_is_written_at_once(tmp_path, monkeypatch, capsys):
    """A run that is stopped leaves the lengths before."""
    path, before = tmp_path / "model.json", []

    def note(models, each):
        report = json.loads(path.read_text()) if path.exists() else {"training": [], "generation": []}
        before.append([[row["name"] for row in report[part]] for part in ("training", "generation")])
        return dict.fromkeys(models, each)

    monkeypatch.setattr(language_models, "build_model", lambda args, name: torch.nn.Linear(2, 3))
    monkeypatch.setattr(language_models, "peak_memory", lambda args, models, length: dict.fromkeys(models, 7))
    monkeypatch.setattr(language_models, "time_training", lambda args, models, length: note(models, [0.5]))
    monkeypatch.setattr(
        language_models, "time_generation", lambda args, models, context: (note(models, [0.25]), dict.fromkeys(models, 9))
    )
    given = ["model", "--mixers", "sum", "--tokens", "8", "16", "--max-tokens", "20", "--contexts", "4", "9", "--json", str(path)]
    report = language_models.measure(bench.build_parser().parse_args(given))
    both = ["fast_weight_lm sum", "transformer_lm"]
    assert before == [[[], []], [both, []], [both * 2, []], [both * 2, both]] and json.loads(path.read_text()) == report
    assert capsys.readouterr().err.splitlines() == [
        *(f"training with {length} tokens: done" for length in (8, 16)),
        *(f"generation after {context} tokens: done" for context in (4, 9)),
    ]
    assert [row["tokens_per_second"] for row in report["training"]] == [32] * 4  # 2 rows of 8, or 1 of 16, in half a second
    assert {row["peak_bytes"] for row in report["training"]} == {7} and {row["state_bytes"] for row in report["generation"]} == {9}
    assert report["parameters"] == [{"name": name, "parameters": 2 * 3 + 3} for name in both]


def test_all_rules_and_mixers_are_those_with_a_time_of_their_own():
    assert {*measure.ALL} == {*RULES, *MIXERS} - {"fwm", "fast_weight"} and len(measure.ALL) == len({*measure.ALL})
    assert language_models.vocabulary("5") == 5


@pytest.mark.parametrize("device, threads, seconds", [("cpu", 1, 3), ("cpu", 2, 20), ("cuda", 1, 20)])
def test_one_thread_is_timed_without_other_processes(device, threads, seconds, monkeypatch):
    """A GPU is waited for before and after the call."""
    happened = []
    own, all_of_them = iter([5, 8]), iter([100, 120])
    monkeypatch.setattr(contest.time, "process_time", lambda: happened.append("clock") or next(own))
    monkeypatch.setattr(contest.time, "perf_counter", lambda: happened.append("clock") or next(all_of_them))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("wait"))
    found = contest.timed(lambda: happened.append("call"), device)
    monkeypatch.undo()
    wait = ["wait"] * (device == "cuda")
    assert found == seconds and happened == [*wait, "clock", "call", *wait, "clock"]


def test_the_processor_has_its_name(monkeypatch):
    monkeypatch.setattr(Path, "read_text", lambda _: "processor : 0\nmodel name\t: A: B\nmodel name\t: C\n")
    assert contest._processor() == "A: B"
    monkeypatch.setattr(contest.platform, "processor", lambda: "of the platform")
    monkeypatch.setattr(Path, "read_text", lambda _: "processor : 0\n")
    assert contest._processor() == "of the platform"
    monkeypatch.setattr(Path, "read_text", lambda _: (_ for _ in ()).throw(FileNotFoundError()))
    assert contest._processor() == "of the platform"


def test_memory_of_the_process(monkeypatch):
    kilobytes = {"VmHWM": 20, "VmRSS": 12}
    monkeypatch.setattr(
        Path, "read_text", lambda _: "Name:\ta:b:c\n" + "".join(f"{name}:\t  {size} kB\n" for name, size in kilobytes.items())
    )
    assert contest.process_memory("VmRSS") == 12 * 1024
    assert contest.peak_beyond(lambda: kilobytes.update(VmHWM=30), "cpu") == 18 * 1024
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(resource, "getrusage", lambda _: SimpleNamespace(ru_maxrss=7))
    assert contest.process_memory("VmRSS") == 7


def test_memory_of_a_gpu(monkeypatch):
    used = {"now": 100, "peak": 900}
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: used.update(peak=used["now"]))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: used["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: used["peak"])
    assert contest.peak_beyond(lambda: used.update(peak=used["peak"] + 30), "cuda") == 30


@pytest.mark.parametrize("terminal, said", [(True, "\r\033[Kround 1 of 1\r\033[Kdone\n"), (False, "done\n")])
def test_progress_takes_the_place_of_the_line_before_on_a_terminal(terminal, said, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    contest.take_turns({"a": int}, 1, untimed=0)
    contest.say("done")
    assert capsys.readouterr().err == said


def test_large_tensors_are_in_huge_pages():
    assert os.environ["THP_MEM_ALLOC_ENABLE"]


def test_kernels_of_others(monkeypatch, capsys):
    """Those that run are timed on a GPU, and why another one does not is said."""
    args, refused = sizes(rules=["gated", "delta"], loop_up_to=0, softmax_up_to=0, cumsum_up_to=0, device="meta"), []
    monkeypatch.setattr(bench_ops, "timed", lambda call, device: call())
    given = {"gated": ("theirs", lambda q, k, v, gates: lambda: q.shape), "delta": ("other", lambda *_: 1 / 0)}
    monkeypatch.setattr(bench_ops, "PEERS", given)
    calls = bench_ops._contenders(args, 5, refused)
    assert [*calls] == ["gated", "delta", "gated chunks", "delta chunks", "theirs"] and calls["theirs"]() == (2, 3, 5, 4)
    assert refused == [{"name": "other", "tokens": 5, "error": "ZeroDivisionError: division by zero"}]
    assert "other: not measured: ZeroDivision" in capsys.readouterr().err
    args.no_peers = True
    assert "theirs" not in bench_ops._contenders(args, 5, refused)
