"""fw-plot from files to files."""

from __future__ import annotations

import pytest

from fw_fairseq import plots

RESULTS = "dpfp1 20 0.0008\ndpfp1 40 0.2\nelu 20 0.001\nelu 40 0.3\n"
LOG = (
    '2026-01-01 00:00:00 | INFO | train_inner | {"epoch": 1, "loss": "9", "num_updates": "1"}\nnoise { not json\n'
    '... | INFO | valid | {"epoch": 1, "valid_loss": "8.5", "valid_num_updates": "1"}\n'
    '... | INFO | valid | {"epoch": 2, "valid_loss": "7.5", "valid_num_updates": "2"}\n'
)


@pytest.fixture
def files(tmp_path):
    (tmp_path / "capacity.txt").write_text(RESULTS)
    (tmp_path / "a.log").write_text(LOG)
    return tmp_path


@pytest.mark.parametrize(
    "command",
    ["capacity capacity.txt --published", "updates capacity.txt", "curves a.log", "curves a.log --metric loss --log-axis"],
)
def test_figures(command, files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    plots.main([*command.split(), "--out", "x.svg", "x.png"])
    assert (files / "x.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (files / "x.svg").read_text()
    assert capsys.readouterr().out.split() == ["x.svg", "x.png"] and not list(files.glob(".*"))


def test_logs_are_read_by_metric(files):
    assert plots.read_log(files / "a.log", "valid_loss") == {1: 8.5, 2: 7.5}
    assert plots.read_log(files / "a.log", "loss") == {1: 9.0}


def test_results_are_read_by_model(files):
    assert plots.read_results(files / "capacity.txt") == {"dpfp1": {20: 0.0008, 40: 0.2}, "elu": {20: 0.001, 40: 0.3}}


@pytest.mark.parametrize(
    "command, message",
    [
        ("capacity missing.txt", "No such file or directory: 'missing.txt'"),
        ("capacity a.log", "a.log, line 1 is '2026-01-01 "),
        ("curves a.log --metric ppl", "a.log has no ppl; train with --log-format json"),
        ("curves capacity.txt", "capacity.txt has no valid_loss"),
    ],
)
def test_mistakes(command, message, files, monkeypatch):
    monkeypatch.chdir(files)
    with pytest.raises(SystemExit, match="fw-plot: error: ") as exit_:
        plots.main([*command.split(), "--out", "x.svg"])
    assert message in str(exit_.value) and not (files / "x.svg").exists()
