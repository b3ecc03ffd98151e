"""fw-bench mixers end to end at a tiny size. No timing is asserted."""

from __future__ import annotations

import json

import pytest

from fw_fairseq.tools.bench import __main__ as bench

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
    printed = capsys.readouterr().out
    assert "| sru |" in printed and "| pool, window 3 |" in printed


def test_mistakes(capsys):
    with pytest.raises(SystemExit):
        bench.main([*TINY, "--heads", "3"])
    assert "--width 8 is not a multiple of --heads 3" in capsys.readouterr().err
