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
from fw_fairseq.tools.bench import authors, layers
from fw_fairseq.tools.plot import style

TINY = ["mixers", "--width", "8", "--heads", "2", "--batch", "2", "--length", "5", "--tokens", "9", "--rounds", "2"]


def test_report(tmp_path, capsys):
    files = ["--json", str(tmp_path / "mixers.json"), "--figure", str(tmp_path / "mixers.png")]
    torch.manual_seed(5)
    bench.main([*TINY, "--windows", "3", "0", *files])
    assert torch.initial_seed() == 0
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
        ("leap, window 3, training", "leap, published form"),
        ("leap, window 3, training", "leap.LEAP.MultiheadLeap"),
        ("leap, window 3, training", "leap"),
        ("additive, window 3, training", "additive"),
    ]
    assert all(ratio == 1 for (_, layer), ratio in found.items() if layer in ("sru", "leap, published form", "additive"))
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
        assert x.shape == ((5, 2, 8) if name in ("sru", layers.LSTM) else (9, 1, 8))
        once = [leaf.grad.clone() for leaf in (x, *layer.parameters())]
        layers.forward_backward(layer, x)
        torch.testing.assert_close([leaf.grad for leaf in (x, *layer.parameters())], once)


def test_softmax_attention_is_causal_and_has_no_bias():
    layer, x = layers.Attention(6, 2).double(), torch.randn(5, 2, 6, dtype=torch.float64)
    (w, out), seen = (p for p in layer.parameters()), torch.ones(5, 5).tril() == 1
    q, k, v = (part.view(5, 2, 2, 3) for part in (x @ w.T).chunk(3, -1))
    weights = (torch.einsum("tbhd,sbhd->bhts", q, k) / 3**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
    expected = torch.einsum("bhts,sbhd->tbhd", weights, v).reshape(5, 2, 6) @ out.T
    torch.testing.assert_close(layer(x)[0], expected)


def test_one_token_follows_as_many_as_a_window_holds(monkeypatch):
    """The time is that of one of 256."""
    read = []

    class Mixer:
        def __init__(self, *sizes, window):
            self.window = window

        def to(self, device):
            return self

        def __call__(self, x, state=0):
            read.append((self.window, tuple(x.shape), state))
            return x, state + 1

    monkeypatch.setattr(layers, "Additive", Mixer)
    monkeypatch.setattr(layers, "Leap", type("Other", (Mixer,), {}))
    monkeypatch.setattr(layers, "timed", lambda call, device: call() or 256.0)
    rows = layers.tokens(SimpleNamespace(width=8, heads=2, windows=[3, 0], device="cpu", rounds=1))
    assert len(rows) == 4 and all(row["seconds"] == 1 for row in rows)
    assert read[:4] == [(3, (3, 1, 8), 0), (0, (1, 1, 8), 0)] * 2
    assert read[4 : 4 + 256] == [(3, (1, 1, 8), 1 + i) for i in range(256)] and len(read) == 4 + 4 * 2 * 256


def test_scans_are_timed_in_each_round(monkeypatch):
    called = []
    monkeypatch.setattr(layers, "timed", lambda call, device: call() or called.append(1) or 0.5)
    sizes = SimpleNamespace(width=8, heads=2, batch=2, length=5, tokens=9, windows=[3], device="cpu", rounds=2)
    rows = layers.scans(sizes)
    assert len(called) == 2 * 3 and all(row["bytes_per_second"] == 2 * row["bytes"] for row in rows)


MACHINE = {"device": "a processor", "threads": 2, "torch": "2.0"}
SETTINGS = {"width": 8, "heads": 2, "batch": 3, "length": 5, "tokens": 9, "rounds": 4}


def test_the_tables_of_reports():
    row = {"name": "sru", "seconds": 0.0125, "times_faster": 2.5}
    report = {"machine": MACHINE, "settings": SETTINGS, "layers": [row | {"peer": "LSTM"}], "tokens": [row]}
    assert layers.table(report | {"scans": [row | {"bytes_per_second": 3e9}]}).splitlines() == [
        "a processor, 2 threads, torch 2.0; width 8; sru and LSTM: batch 3, length 5; the others: one sequence of 9, 2 heads;"
        " medians of 4 rounds",
        "",
        "| forward + backward | ms | against | times as fast |",
        "|---|---:|---|---:|",
        "| sru | 12.5 | LSTM | 2.5 |",
        "",
        "| one token, no gradients | ms |",
        "|---|---:|",
        "| sru | 12.500 |",
        "",
        "| scan alone, forward + backward | ms | GB/s of the least it has to move |",
        "|---|---:|---:|",
        "| sru | 12.50 | 3.0 |",
    ]
    peers = {"machine": MACHINE, "settings": SETTINGS, "peers": [row | {"layer": "sru.SRU"}], "not_measured": {"x": "No x."}}
    assert layers.table(peers).splitlines() == [
        "a processor, 2 threads, torch 2.0; width 8; sru: batch 3, length 5; the others: one sequence of 9, 2 heads; medians of 4"
        " rounds",
        "",
        "| | layer | ms | the first is so many times as fast |",
        "|---|---|---:|---:|",
        "| sru | sru.SRU | 12.5 | 2.50 |",
        "",
        "No x.",
    ]


@pytest.mark.parametrize("key, names", [("layers", ["a", "b", "c"]), ("peers", ["a: x", "b: x", "c: x"])])
def test_the_figure_has_a_bar_for_each_layer(key, names, monkeypatch):
    """The first is on top; lines are for the milliseconds only."""
    rows, figures = [{"name": name, "layer": "x", "seconds": 0.002} for name in "abc"], []
    monkeypatch.setattr(style, "save", lambda figure, _: figures.append(figure))
    layers.draw({key: rows}, "x.svg")
    [axes] = figures[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == names[::-1]
    assert [(bar.get_width(), bar.get_height()) for bar in axes.patches] == [(2, pytest.approx(0.7))] * 3
    assert axes.get_xlabel() == "forward + backward, ms" and figures[0].get_size_inches()[1] == 2.2
    assert [lines.get_gridlines()[0].get_visible() for lines in (axes.xaxis, axes.yaxis)] == [True, False]


def test_the_authors_layers_have_the_sizes_of_ours(monkeypatch):
    """And no dropout; a kind of error that only their code knows is a sentence too."""
    given = []

    class Kept(Theirs):
        def __init__(self, *args, **options):
            super().__init__()
            given.append((args, options))

        def forward(self, *inputs):
            given.append([tuple(x.shape) for x in inputs])
            return inputs[0]

    monkeypatch.setattr(authors, "author", lambda module, name: Kept)
    x = torch.randn(5, 2, 16)
    leap, additive = authors.AuthorsLeap(16, 2, 3), authors.AuthorsAdditive(16, 2, 3)
    assert leap.projections.weight.shape == (64, 16) and leap.projections.bias is None
    assert given.pop(0) == ((16, 2, 3), {"dropout": 0.0})
    (options, window), _ = given.pop(0)
    assert vars(options) == {
        "hidden_size": 16, "n_heads": 2, "rescale": 10, "initializer_range": 0.25, "hidden_dropout_prob": 0.0
    } and window == 3  # fmt: skip
    assert leap(x)[0].shape == additive(x)[0].shape == x.shape
    assert given == [[(2, 5, 16)] * 4, [(2, 5, 16), (2, 5, 1)]]
    given.clear()
    authors.cases(SimpleNamespace(width=8, heads=2, batch=2, length=5, tokens=9, windows=[], device="cpu"), {})
    assert given == [((8, 8), {"num_layers": 1})] * 4

    def fail():
        raise RuntimeError("no\nmore")

    found, missing = {"sru": None}, {}
    authors.add(found, "sru.SRU", missing, fail)
    assert missing == {"sru.SRU": "sru.SRU is not measured: RuntimeError: no"} and list(found) == ["sru"]


def test_times_of_many_calls_are_those_of_one(monkeypatch):
    """Each call starts without gradients."""
    monkeypatch.setattr(authors, "timed", lambda call, device: 100.0)
    args = SimpleNamespace(width=8, heads=2, batch=2, length=5, tokens=9, windows=[3], device="cpu", rounds=2, threads=1)
    torch.manual_seed(5)
    rows = authors.measure(args)["peers"]
    assert torch.initial_seed() == 0
    assert [row["seconds"] for row in rows if row["layer"] == "sru"] == [100, 100, 5, 1]
    for case in authors.cases(args, {}):
        assert case.x.requires_grad == case.trains and all(layer.training == case.trains for layer in case.layers.values())
    sru, *_, leap, _ = (case.layers for case in authors.cases(args, {}))
    assert sru["sru"].highway_bias == 0 and leap["leap, published form"].out_proj is None is not leap["leap"].out_proj
    layer, x = nn.Linear(8, 8), torch.ones(2, 1, 8)
    authors.run(
        authors.Case("", {}, x, True, 3), type("Pair", (), {"zero_grad": layer.zero_grad, "__call__": lambda _, x: (layer(x),)})()
    )
    assert layer.bias.grad.tolist() == [2] * 8
