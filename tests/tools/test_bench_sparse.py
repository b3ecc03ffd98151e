"""fw-bench sparse end to end at a tiny size. No timing is asserted."""

from __future__ import annotations

import json
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from fw_fairseq.tools.bench import __main__ as bench
from fw_fairseq.tools.bench import sparse


def test_report(tmp_path, capsys):
    files = ["--json", str(tmp_path / "sparse.json"), "--figure", str(tmp_path / "sparse.png")]
    bench.main(
        ["sparse", "--sizes", "tiny", "--contexts", "1", "40", "--steps", "1", "--rounds", "2", "--vocabulary", "64", *files]
    )
    report = json.loads((tmp_path / "sparse.json").read_text())
    assert [row["name"] for row in report["models"]] == list(sparse.MODELS)
    read = [row["weights_read"] for row in report["models"]]
    assert read == sorted(read, reverse=True) or read[-1] <= read[0]
    state = {(row["name"], row["context"]): row["bytes_of_state"] for row in report["tokens"]}
    keys_and_values = 2 * 64 * 2 * 4  # of a token
    assert state["dense", 40] - state["dense", 1] == 39 * keys_and_values
    recurrent = "+ gated_delta for softmax"
    assert state[recurrent, 40] == 4 * (2 * 2 * 32 * 32 + 2 * 2 * 64 + 2 * 32) > state[recurrent, 1]
    assert all(0 < row["min"] <= row["seconds"] <= row["max"] for row in report["tokens"])
    printed = capsys.readouterr().out
    assert "| tiny, 1 thread | parameters | weights read | after 1 | after 40 |" in printed and "| + sparse loss | " in printed
    assert (tmp_path / "sparse.png").stat().st_size > 1000


@pytest.mark.parametrize("name", sparse.MODELS)
@torch.no_grad()
def test_a_token_reads_the_weights_that_count(name, monkeypatch):
    """NaN in all others changes nothing."""
    args = Namespace(contexts=[1], vocabulary=64, type="fp32")
    monkeypatch.setitem(sparse.MODELS, name, {k: min(v, 8) if type(v) is int else v for k, v in sparse.MODELS[name].items()})
    model = sparse.build_model(args, sparse.Size(2, 32, 2, 64), sparse.MODELS[name])
    token, unread = torch.full((1, 1), 5), 0
    expected = model.decoder(token, incremental_state={})[0]
    for layer in model.decoder.layers.children():
        feed_forward = layer.fc2
        if isinstance(feed_forward, sparse.SparseFeedForward):
            chosen = []
            hook = feed_forward.register_forward_pre_hook(lambda _, inputs: chosen.append(inputs[0]))  # noqa: B023
            model.decoder(token, incremental_state={})
            hook.remove()
            rest = feed_forward.mask(chosen[0].view(1, -1))[0] == 0
            feed_forward.weight_in[rest], feed_forward.weight_out[rest] = torch.nan, torch.nan
            unread += 2 * int(rest.sum()) * 32
    others = torch.arange(64) != 5
    model.decoder.embed_tokens.weight[others] = torch.nan
    unread += 63 * 32
    torch.testing.assert_close(model.decoder(token, incremental_state={})[0], expected)
    assert sparse.weights_read(model.decoder) == sum(p.numel() for p in model.decoder.parameters()) - unread


def test_the_table_of_a_report():
    """A line for each layer and for each model, which is compared with the dense one after as many tokens."""
    measured = {"bytes": 2e6, "seconds": 4e-4, "read_speed": 8e9, "copy_speed": 5.5e9}
    reads = {"dense": 2_400_000, "+ sparse loss": 600_000}
    seconds = {("dense", 1): 5e-4, ("dense", 40): 8e-4, ("+ sparse loss", 1): 2.5e-4, ("+ sparse loss", 40): 2e-4}
    size = {"size": "tiny"}
    report = {
        "machine": {"device": "a processor", "torch": "2.0"},
        "settings": {"type": "fp32", "vocabulary": 64, "rounds": 3, "steps": 4},
        "products": [size | {"name": "compiled", "threads": 1} | measured],
        "models": [size | {"name": name, "parameters": 2_500_000, "weights_read": read} for name, read in reads.items()],
        "tokens": [size | {"name": name, "threads": 2, "context": t, "seconds": s} for (name, t), s in seconds.items()],
    }
    assert sparse.table(report).splitlines() == [
        "a processor, torch 2.0, fp32, 64 words; milliseconds per token, medians of 3 rounds of 4 tokens; in brackets: times as"
        " fast as dense after as many tokens",
        "",
        "| feed-forward layer of a token | microseconds | read | GB/s | a matrix is read at | a copy reads at |",
        "|---|---:|---:|---:|---:|---:|",
        "| tiny, 1 thread, compiled | 400 | 2.00 MB | 5.0 | 8.0 | 5.5 |",
        "",
        "| tiny, 2 threads | parameters | weights read | after 1 | after 40 |",
        "|---|---:|---:|---:|---:|",
        "| dense | 2.5M | 2.4M | 0.50 | 0.80 |",
        "| + sparse loss | 2.5M | 0.6M | 0.25 (2.0 x) | 0.20 (4.0 x) |",
    ]


def test_weights_come_from_one_block():
    """Which starts again in each tensor, and where it ends; norms are near 1."""
    block = torch.randn(2**20 + 7, generator=torch.Generator().manual_seed(1))
    model = torch.nn.Sequential()
    model.wide, model.norm = torch.nn.Linear(4, 2**18 + 2), torch.nn.LayerNorm(4)
    model.register_buffer("table", torch.ones(3))
    sparse.fill(model)
    flat = model.wide.weight.flatten()
    assert torch.equal(flat[: len(block)], block * 0.5) and flat[len(block)] == block[0] * 0.5
    assert not model.wide.bias.any() and model.norm.weight.tolist() == [1] * 4 and not model.norm.bias.any()
    assert not model.table.any()


def test_weights_are_made_in_their_type():
    """What is made after the model is in fp32 again."""
    args = Namespace(contexts=[1], vocabulary=64, type="bf16")
    try:
        model = sparse.build_model(args, sparse.SIZES["tiny"], sparse.MODELS["dense"])
        assert {x.dtype for x in model.parameters()} == {torch.bfloat16} and torch.zeros(1).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_each_token_that_is_timed_follows_the_one_before(monkeypatch):
    """The first of them follows the context and the token that gave its buffers room."""
    lengths: list[int] = []
    monkeypatch.setattr(sparse, "timed", lambda call, device: call() or float(lengths[-1] ** 2))
    model = SimpleNamespace(decoder=lambda tokens, incremental_state: lengths.append(tokens.shape[1]))
    args = Namespace(steps=3, vocabulary=64, device="cpu")
    assert sparse.time_tokens(args, model, {}, 5) == 8**2 and lengths == [7, 8, 9]


def test_rows_of_one_feed_forward_layer(monkeypatch):
    """Eight layers take turns, so that none is in a cache, and two dense ones; memory is read and copied in 64 MiB."""
    called, products = [], []
    monkeypatch.setattr(sparse, "timed", lambda call, device: called.append(call()) or 0.5)
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w, *b: products.append((x.shape, w.nbytes)) or linear(x, w, *b))
    rows = sparse.measure_products(Namespace(type="fp32", device="cpu", rounds=1), "tiny", 3)
    assert len(called) == 2 * (8 + 8 + 2 + 2) and ((1, 2048), 2**26) in products
    assert all(x.shape == (1, 64) for x in called[:18])
    assert called[19].nbytes == 2**26
    chosen = 4 * (2 * 64 + 128 * 2 + 128 + 2 * 2 * 64 + 64)  # controller, its bias, 2 of 128 units, bias
    assert {row["name"]: row["bytes"] for row in rows} == {
        "compiled": chosen, "PyTorch": chosen, "dense": 4 * (2 * 64 * 128 + 64 + 128)
    }  # fmt: skip
    for row in rows:
        assert (row["size"], row["threads"], row["seconds"]) == ("tiny", 3, 0.5)
        assert row["read_speed"] == row["copy_speed"] == 2**27


def test_what_is_measured_is_written_at_once(tmp_path, monkeypatch):
    """With as many threads as the row says. A run that is stopped leaves the models before."""
    threads, path = [], tmp_path / "sparse.json"

    def measure_model(args, size, name, report):
        if name == "second":
            raise KeyboardInterrupt
        report["models"].append(name)

    monkeypatch.setattr(sparse, "measure_model", measure_model)
    monkeypatch.setattr(
        sparse, "measure_products", lambda args, size, count: threads.append((count, torch.get_num_threads())) or []
    )
    before = torch.get_num_threads()
    given = ["sparse", "--sizes", "tiny", "--try-threads", "2", "1", "--json", str(path)]
    args = bench.build_parser().parse_args(given)
    args.models = ["first", "second"]
    try:
        with pytest.raises(KeyboardInterrupt):
            sparse.measure(args)
    finally:
        torch.set_num_threads(before)
    assert json.loads(path.read_text())["models"] == ["first"] and threads == [(2, 2), (1, 1)]
