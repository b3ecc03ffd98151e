"""fw-bench sparse end to end at a tiny size. No timing is asserted."""

from __future__ import annotations

import gc
import json
import weakref
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch

from fw_fairseq.tools.bench import __main__ as bench
from fw_fairseq.tools.bench import sparse

FEWEST = Namespace(contexts=[3], vocabulary=5, type="fp32", steps=1, device="cpu")


def test_report(tmp_path, capsys):
    files = ["--json", str(tmp_path / "sparse.json"), "--figure", str(tmp_path / "sparse.png")]
    bench.main(
        ["sparse", "--sizes", "tiny", "--contexts", "1", "40", "--steps", "1", "--rounds", "2", "--vocabulary", "64", *files]
    )
    report = json.loads((tmp_path / "sparse.json").read_text())
    assert [row["name"] for row in report["models"]] == list(sparse.MODELS)
    read = [row["weights_read"] for row in report["models"]]
    assert read == sorted(read, reverse=True) or read[-1] <= read[0]
    layer = 4 * (64 * 64 + 64) + 64 * 128 + 128 + 128 * 64 + 64 + 2 * 2 * 64  # attention, feed-forward, two norms
    assert report["models"][0]["parameters"] == 2 * layer + 2 * 64 + 2 * 64 * 64  # the last norm; words before and after
    assert [row["bytes_of_weights"] for row in report["tokens"]] == [4 * count for count in read for _ in range(2)]
    state = {(row["name"], row["context"]): row["bytes_of_state"] for row in report["tokens"]}
    keys_and_values = 2 * 64 * 2 * 4  # of a token
    recurrent = "+ gated_delta for softmax"
    for name in {*sparse.MODELS} - {recurrent}:  # without the room of their buffers
        assert state[name, 40] - state[name, 1] == 39 * keys_and_values
    assert state[recurrent, 40] == 4 * (2 * 2 * 32 * 32 + 2 * 2 * 64 + 2 * 32) > state[recurrent, 1]
    assert all(0 < row["min"] <= row["seconds"] <= row["max"] for row in report["tokens"])
    printed = capsys.readouterr().out
    assert "| tiny, 1 thread | parameters | weights read | after 1 | after 40 |" in printed and "| + sparse loss | " in printed
    assert (tmp_path / "sparse.png").stat().st_size > 1000


def test_sizes_and_parts():
    """Layers, width, heads and hidden units; each model has the parts of the one before."""
    sizes = {
        "tiny": (2, 64, 2, 128), "110M": (12, 768, 12, 3072), "470M": (24, 1024, 16, 6144), "1.6B": (30, 2048, 16, 8192),
        "3.9B": (34, 3072, 24, 12288),
    }  # fmt: skip
    assert sizes == sparse.SIZES
    for name, (layers, width, _, units) in sizes.items():  # square matrices of attention, feed-forward, words before and after
        numbers = layers * (4 * width**2 + 2 * width * units) + 2 * 32000 * width
        assert name == "tiny" or numbers == pytest.approx(float(name[:-1]) * {"M": 1e6, "B": 1e9}[name[-1]], rel=0.25)
    parts = {"ffn_sparsity": 64, "ffn_sru": 32, "qkv_sparsity": 16, "output_sparsity": 4}
    found = [{key: value for key, value in options.items() if key in parts} for options in sparse.MODELS.values()]
    assert found == [{name: parts[name] for name in [*parts][:count]} for count in (0, 2, 3, 4, 4)]


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
        assert model.decoder.embed_positions is None
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_model_is_measured_after_every_context_with_every_number_of_threads(monkeypatch):
    """Beside the speed of memory. It is gone before the next one is made, also where only the garbage collector frees it."""
    happened, made = [], []

    def build(args, *given):
        assert not any(model() for model in made)
        happened.append(given)
        model = torch.nn.Linear(3, 2)
        model.decoder, model.itself = SimpleNamespace(), [model]
        made.append(weakref.ref(model))
        return model

    monkeypatch.setattr(sparse, "build_model", build)
    monkeypatch.setattr(sparse, "measure_products", lambda *given: [])
    monkeypatch.setattr(sparse, "weights_read", lambda decoder: 7)
    monkeypatch.setattr(sparse, "state_after", lambda model, context: context)
    monkeypatch.setattr(sparse, "state_bytes", lambda state: 100 * state)
    monkeypatch.setattr(sparse, "time_tokens", lambda args, model, state, context: happened.append((state, context)) or 0.25)
    monkeypatch.setattr(sparse, "probes", lambda args: {"read": lambda: 0.5, "copy": lambda: 2.0})
    monkeypatch.setattr(torch, "set_num_threads", happened.append)
    names = ["dense", "+ sparse loss"]
    args = Namespace(
        sizes=["tiny"], models=names, type="bf16", try_threads=[2, 1], contexts=[3, 5], rounds=1, device="cpu", json=None
    )
    gc.disable()
    try:
        report = sparse.measure(args)
    finally:
        gc.enable()
    turns = [2, (3, 3), (3, 3), (5, 5), (5, 5), 1, (3, 3), (3, 3), (5, 5), (5, 5)]  # one round is not timed
    assert happened == [2, 1] + [x for name in names for x in [(sparse.SIZES["tiny"], sparse.MODELS[name]), *turns]]
    assert report["models"] == [{"size": "tiny", "name": name, "parameters": 8, "weights_read": 7} for name in names]
    measured = {"seconds": 0.25, "min": 0.25, "max": 0.25, "bytes_of_weights": 14, "read_speed": 2**27, "copy_speed": 2**25}
    assert report["tokens"] == [
        {"size": "tiny", "name": name, "threads": threads, "context": context, "bytes_of_state": 100 * context} | measured
        for name in names for threads in (2, 1) for context in (3, 5)
    ]  # fmt: skip


@torch.no_grad()
def test_a_state_has_read_its_context_and_a_token_that_gives_it_room():
    """Five words are the fewest: the special symbols and one more."""
    model, read = sparse.build_model(FEWEST, sparse.SIZES["tiny"], sparse.MODELS["dense"]), []
    model.decoder.register_forward_pre_hook(lambda _, given: read.append(given[0].tolist()))
    state = sparse.state_after(model, 3)
    assert read == [[[4]], [[4] * 4]]
    assert sparse.state_bytes(state) == 2 * 2 * 4 * 64 * 4  # keys and values, in two layers, of four tokens
    sparse.time_tokens(FEWEST, model, state, 3)
    assert read[2:] == [[[4] * 5]]


@pytest.mark.parametrize(
    "change, message",
    [
        (["--vocabulary", "4"], "4 leaves no room beside fairseq's 4 special symbols"),
        (["--device", "cuda"], "sparse measures a CPU; leave out --device cuda"),
    ],
)
def test_mistakes(change, message, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(SystemExit) as exit_:
        bench.main(["sparse", *change])
    assert exit_.value.code == 2 and message in capsys.readouterr().err


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


def test_what_is_measured_is_written_at_once(tmp_path, monkeypatch, capsys):
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
    assert capsys.readouterr().err == "tiny, first: done\n"
