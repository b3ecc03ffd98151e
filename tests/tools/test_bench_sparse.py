"""fw-bench sparse end to end at a tiny size. No timing is asserted."""

from __future__ import annotations

import json
from argparse import Namespace

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
