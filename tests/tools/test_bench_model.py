"""fw-bench model end to end at a tiny size. No timing is asserted."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from fw_fairseq.tools.bench import __main__ as bench
from fw_fairseq.tools.bench import measure

SIZES = ["--layers", "1", "--width", "16", "--heads", "2", "--ffn", "16", "--vocabulary", "20"]
TINY = [
    "model",
    *SIZES,
    "--tokens",
    "8",
    "2048",
    "--max-tokens",
    "64",
    "--contexts",
    "8",
    "32",
    "64",
    "--steps",
    "2",
    "--rounds",
    "2",
]
NAMES = {"fast_weight_lm delta", "fast_weight_lm sru", "transformer_lm"}


def test_model_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    files = ["--json", str(tmp_path / "model.json"), "--figure", str(tmp_path / "model.png")]
    bench.main([*TINY, "--mixers", "delta", "sru", *files])
    report = json.loads((tmp_path / "model.json").read_text())
    assert {row["name"] for row in report["parameters"]} == NAMES
    assert {(row["name"], row["tokens"]) for row in report["training"]} == {(n, t) for n in NAMES for t in (8, 2048)}
    assert {(row["name"], row["context"]) for row in report["generation"]} == {(n, c) for n in NAMES for c in (8, 32, 64)}
    assert all(0 < row["min"] <= row["seconds"] <= row["max"] for row in report["training"] + report["generation"])
    state = {name: [row["state_bytes"] for row in report["generation"] if row["name"] == name] for name in NAMES}
    keys_and_values = 2 * 16 * 4 * 5  # 5 hypotheses
    assert state.pop("transformer_lm") == [keys_and_values * context for context in (8, 32, 64)]
    assert all(sizes[0] > 0 and len(set(sizes)) == 1 for sizes in state.values())
    assert len(report["ratios"]) == 2 * (2 + 3)
    peak = {(row["name"], row["tokens"]): row["peak_bytes"] for row in report["training"]}
    assert peak["transformer_lm", 2048] > 2048**2 * 4 > peak["transformer_lm", 8] >= 0  # its mask alone
    assert peak["fast_weight_lm sru", 2048] < peak["transformer_lm", 2048]
    assert (tmp_path / "model.png").stat().st_size > 1000
    printed, progress = capsys.readouterr()
    assert "| transformer_lm | " in printed and f"| {keys_and_values * 8 / 1e3:.0f} |" in printed
    said = [f"memory of {name}, {tokens} tokens" for name in NAMES for tokens in (8, 2048)]
    assert all(f"\r\033[K{part}" in progress for part in [*said, "training, 8 tokens, round 2 of 2"])

    report["training"] = [row for row in report["training"] if row["tokens"] == 8]
    del report["settings"]["host"]  # as in an older report
    (tmp_path / "model.json").write_text(json.dumps(report))
    bench.main([*TINY, "--mixers", "delta", "sru", *files, "--resume"])
    resumed = json.loads((tmp_path / "model.json").read_text())
    assert resumed["generation"] == report["generation"] and resumed["training"][: len(NAMES)] == report["training"]
    assert {row["tokens"] for row in resumed["training"][len(NAMES) :]} == {2048}
    with pytest.raises(SystemExit, match=r"model.json was measured with mixers \['delta', 'sru'\], not \['delta'\]"):
        bench.main([*TINY, *files, "--resume"])


@pytest.mark.parametrize(
    "change, message",
    [
        (["--mixers", "dleta"], "invalid choice: 'dleta'"),
        (["--contexts", "0"], "0 is not a positive number"),
        (["--heads", "3"], "--width 16 is not a multiple of --heads 3"),
        (["--vocabulary", "4"], "4 leaves no room beside fairseq's 4 special symbols"),
        (["--figure", "no/such/folder/x.png"], "no/such/folder is not a folder"),
        (["--resume"], "--resume needs --json"),
        (["--device", "cuda"], "needs a CUDA device"),
    ],
)
def test_mistakes(change, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_:
        bench.main([*TINY, *change])
    assert exit_.value.code == 2 and message in capsys.readouterr().err


def test_the_host_alone(tmp_path, capsys, monkeypatch):
    """With graphs and without; additive attention runs without the decoding kernel."""
    replays, replay = [], measure.Idle.replay
    monkeypatch.setattr(measure.Idle, "replay", lambda self: replays.append(1) or replay(self))
    monkeypatch.setattr(measure, "HOST_STEPS", 8)
    command = ["model", *SIZES, "--host", "--rounds", "1", "--threads", "1"]
    bench.main([*command, "--mixers", "sum", "gated", "--json", str(tmp_path / "host.json")])
    rows = json.loads((tmp_path / "host.json").read_text())["host"]
    assert len(rows) == 4 and sum(row["graph"] for row in rows) == 2 and all(row["seconds"] > 0 for row in rows)
    assert len(replays) == 2 * 2 * 6  # 2 rounds, 6 tokens after the first two
    assert capsys.readouterr().out.count("| fast_weight_lm gated | yes |") == 1
    with pytest.raises(SystemExit, match="--mixers: the decoding kernel does not do a step of additive"):
        bench.main([*command, "--mixers", "additive"])
    with pytest.raises(SystemExit):
        bench.main([*command, "--resume", "--json", str(tmp_path / "host.json")])


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


def test_a_cpu_has_no_graphs_to_leave_out(capsys):
    with pytest.raises(SystemExit):
        bench.main([*TINY, "--no-decoding-graph"])
    assert "--no-decoding-graph needs --device cuda" in capsys.readouterr().err
