"""recipes/convergence: runs end by their learning rate, finished ones are left alone, unfinished ones are not in a table."""

from __future__ import annotations

import importlib.util
import json

import pytest
from support.commands import ROOT, succeed
from support.recipes import recipe

ENDED = "stopping training because current learning rate"
FOLDER = ROOT / "recipes" / "convergence"
ROW = r"| {row} | 1 | "


@pytest.fixture(scope="module")
def status():
    spec = importlib.util.spec_from_file_location("convergence_status", FOLDER / "status.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_log(folder, losses: list[float], ended: bool) -> None:
    """A log of fairseq-train with these validation losses, half an hour for each epoch."""
    folder.mkdir(parents=True)
    lines = ["2026-01-01 | INFO | fairseq_cli.train | {not json"]
    for epoch, loss in enumerate(losses, 1):
        valid = {"epoch": epoch, "valid_loss": str(loss), "valid_ppl": str(round(2 ** (loss - 1), 2))}
        lines += [f"x | INFO | train | {json.dumps({'epoch': epoch, 'train_train_wall': '1800'})}", f"x | {json.dumps(valid)}"]
    if ended:
        lines.append(f"{ENDED} (8e-05) is smaller than or equal to minimum learning rate")
    (folder / "train.log").write_text("\n".join(lines) + "\n")


def test_status_of_runs(status, tmp_path, capsys):
    write_log(tmp_path / "a-1", [7.0, 6.0, 6.5], ended=True)
    write_log(tmp_path / "b-1", [7.0], ended=False)
    write_log(tmp_path / "c-1", [], ended=False)
    status.main("--ended", ENDED, str(tmp_path))
    assert capsys.readouterr().out.splitlines() == [
        "a-1: finished, 3 epochs, best validation perplexity 32.00 after epoch 2",  # valid_ppl
        "b-1: unfinished, 1 epochs, best validation perplexity 64.00 after epoch 1",
        "c-1: unfinished, no epoch is complete",
    ]
    status.main("--cells", str(tmp_path / "a-1"), "5.1", "")
    assert capsys.readouterr().out == "32.00 | 5.1 |  | 3 | 1.5\n"
    with pytest.raises(SystemExit, match="the log of c-1 has no validation loss"):
        status.main("--cells", str(tmp_path / "c-1"))
    status.main("--ended", ENDED, str(tmp_path / "nothing"))
    assert capsys.readouterr().out == "no run has begun\n"


def test_language_models_and_conversion(tmp_path):
    out = tmp_path / "out_toy"
    done = recipe("convergence/conversion.sh", out, "decay-4-distilled")
    assert done.returncode == 1 and "softmax-0.1-1 is not finished; run recipes/convergence/language.sh softmax" in done.stderr
    printed = succeed(recipe("convergence/language.sh", out, "softmax"))
    best, segments, sliding, stream, epochs, _ = cells(printed, "softmax")
    assert min(map(float, (best, segments, sliding))) > 10 and stream == "" and int(epochs) > 3
    log = (out / "runs" / "language" / "softmax-0.1-1" / "train.log").read_text()
    assert ENDED in log
    printed = succeed(recipe("convergence/conversion.sh", out, "decay-4-distilled"))
    converted, _, tuned, share = (float(cell.strip("%")) for cell in cells(printed, "decay-4-distilled")[:4])
    softmax = float((out / "runs" / "language" / "softmax-0.1-1" / "segments").read_text())
    assert tuned < converted and share == pytest.approx(100 * softmax / tuned, abs=0.06)
    stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.suffix in (".pt", ".log")}
    again = recipe("convergence/conversion.sh", out, "decay-4-distilled")
    assert succeed(again) and again.stdout in printed and "training" not in again.stderr
    assert stamps == {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.suffix in (".pt", ".log")}
    assert "decay-4-distilled-0.1-1: finished, " in succeed(recipe("convergence/conversion.sh", out, "--status"))


def cells(printed: str, row: str) -> list[str]:
    [line] = [line for line in printed.splitlines() if line.startswith(ROW.format(row=row))]
    return [cell.strip() for cell in line.strip("|").split("|")][2:]


@pytest.mark.parametrize("row", ["softmax-stream", "hebb", "sru-other", "sru-parts"])
def test_rows_that_are_none(row, tmp_path):
    done = recipe("convergence/language.sh", tmp_path / "out_toy", row)
    assert done.returncode == 1 and f"ROW is {row}; it must be one of additive additive_all decay " in done.stderr
    done = recipe("convergence/conversion.sh", tmp_path / "out_toy", "leap-4")
    assert done.returncode == 1 and "ROW is leap-4; it must be RULE-M" in done.stderr
