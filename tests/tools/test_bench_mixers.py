"""fw-bench mixers end to end at a tiny size. No timing is asserted."""

from __future__ import annotations

import json
import sys
from collections import Counter
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

from fw_fairseq.tools.bench import __main__ as bench
from fw_fairseq.tools.bench import layers

TINY = ["mixers", "--width", "8", "--heads", "2", "--batch", "2", "--length", "5", "--tokens", "9", "--rounds", "2"]


def test_report(tmp_path, capsys):
    files = ["--json", str(tmp_path / "mixers.json"), "--figure", str(tmp_path / "mixers.png")]
    bench.main([*TINY, "--windows", "3", "0", *files])
    rows = {row["name"]: row for row in json.loads((tmp_path / "mixers.json").read_text())["layers"]}
    assert set(rows) >= {"sru", "torch.nn.LSTM", "additive, window 3", "additive, all of the past", "softmax attention"}
    assert rows["sru"]["peer"] == "torch.nn.LSTM" and rows["additive, window 3"]["peer"] == "softmax attention"
    assert rows["softmax attention"]["times_faster"] == 1
    assert (tmp_path / "mixers.png").stat().st_size > 1000
    scans = {row["name"]: row["bytes"] for row in json.loads((tmp_path / "mixers.json").read_text())["scans"]}
    assert scans == {"sru": 16 * 4 * 5 * 2 * 8, "pool, window 3": 6 * 4 * 9 * 8, "pool, all of the past": 6 * 4 * 9 * 8}
    tokens = [row["name"] for row in json.loads((tmp_path / "mixers.json").read_text())["tokens"]]
    assert tokens == [f"{layer}, {seen}" for layer in ("additive", "leap") for seen in ("window 3", "all of the past")]
    printed = capsys.readouterr().out
    assert "| sru |" in printed and "| pool, window 3 |" in printed


class Theirs(nn.Module):
    """Takes the place of a layer of another package: it keeps what it was called with."""

    calls: ClassVar[list[tuple]] = []

    def __init__(self, *args, **options):
        super().__init__()
        self.weight, self.args = nn.Parameter(torch.ones(1)), args

    def forward(self, *inputs):
        self.calls.append((self.args, [tuple(x.shape) for x in inputs], torch.is_grad_enabled()))
        return (self.weight * inputs[0],) if len(inputs) == 1 else self.weight * inputs[0]


def test_peers(monkeypatch, tmp_path, capsys):
    """The same shapes for both, and as many calls as are timed together; a package that is not there is named in a sentence."""
    for name in ("sru", "leap", "leap.LEAP"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(SRU=Theirs, MultiheadLeap=Theirs))
    monkeypatch.setitem(sys.modules, "leap.fastformerLM", None)
    Theirs.calls.clear()
    report = tmp_path / "peers.json"
    bench.main([*TINY, "--windows", "3", "--peers", "--json", str(report), "--figure", str(tmp_path / "peers.png")])
    rows = json.loads(report.read_text())["peers"]
    found = {(row["name"], row["layer"]): row["times_faster"] for row in rows}
    jobs = ["sru, training", "sru, no gradients", "sru, no gradients, one sequence", "sru, no gradients, one token"]
    assert list(found) == [
        *((job, layer) for job in jobs for layer in ("sru", "sru.SRU", "torch.nn.LSTM")),
        ("leap, window 3, training", "leap"),
        ("leap, window 3, training", "leap.LEAP.MultiheadLeap"),
        ("additive, window 3, training", "additive"),
    ]
    assert all(ratio == 1 for (_, layer), ratio in found.items() if layer in ("sru", "leap", "additive"))
    calls = Counter((args, shapes[0], gradients) for args, shapes, gradients in Theirs.calls)
    together = {((5, 2, 8), True): 1, ((5, 2, 8), False): 1, ((5, 1, 8), False): 20, ((1, 1, 8), False): 100}
    together = {((8, 8), *batch): times for batch, times in together.items()} | {((8, 2, 3), (1, 9, 8), True): 1}
    assert calls == {case: 3 * times for case, times in together.items()}  # 2 rounds after one that is not timed
    printed = capsys.readouterr().out
    assert "| leap, window 3, training | leap.LEAP.MultiheadLeap |" in printed
    assert (
        "FastSelfAttention is not measured, because there is no module leap.fastformerLM.fastformer; pip install leap-transformer"
        in printed
    )


def test_mistakes(capsys):
    with pytest.raises(SystemExit):
        bench.main([*TINY, "--heads", "3"])
    assert "--width 8 is not a multiple of --heads 3" in capsys.readouterr().err


def test_the_backward_is_timed():
    """What is timed with the forward computes every gradient."""
    leaf, reached = torch.ones(3, requires_grad=True), []
    leaf.register_hook(reached.append)
    layers.differentiate(lambda: (leaf * 2, None), [leaf])
    assert len(reached) == 1 and reached[0].tolist() == [2, 2, 2]
    sizes = SimpleNamespace(width=8, heads=2, batch=2, length=5, tokens=9, windows=[3, 0], device="cpu")
    for name, (layer, x) in layers.contenders(sizes).items():
        layers.forward_backward(layer, x)
        assert x.grad is not None, name
