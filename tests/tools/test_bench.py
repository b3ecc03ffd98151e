"""fw-bench end to end at a tiny size: every figure is there, every mistake is a sentence. No timing is asserted."""

from __future__ import annotations

import argparse
import json
import logging
import re
import shlex

import pytest
from support.commands import ROOT

from fw_fairseq.rules import RULES
from fw_fairseq.tools.bench import __main__ as bench
from fw_fairseq.tools.bench import ops as bench_ops
from fw_fairseq.tools.bench.contest import take_turns

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


def test_sizes_without_options():
    """With them docs/results/ops.md is made again."""
    parser = argparse.ArgumentParser()
    bench_ops.add_arguments(parser)
    args = parser.parse_args([])
    assert args.tokens == [512, 1024, 8192] and (args.batch, args.heads, args.key_width, args.value_width) == (4, 8, 64, 64)


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
    assert reports == {*folder.glob("*.json")}


def test_ops_report(tmp_path, capsys, caplog, monkeypatch):
    outputs = ["--json", str(tmp_path / "ops.json"), "--figure", str(tmp_path / "ops.png")]
    monkeypatch.setattr(logging.getLogger(), "level", logging.DEBUG)  # as the first import of fairseq leaves it
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
