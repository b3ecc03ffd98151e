"""recipes/convergence: runs end by their learning rate, finished ones are left alone, unfinished ones are not in a table."""

from __future__ import annotations

import json
import math
import re
import subprocess
from argparse import Namespace

import pytest
import torch
from fairseq import checkpoint_utils, utils
from fairseq.data import data_utils
from sacrebleu import corpus_bleu
from support import parallel_text
from support.commands import ROOT, succeed
from support.recipes import load, recipe, results_script

from fw_fairseq.tools.plot.logs import read_log

ENDED = "stopping training because current learning rate"
FOLDER = ROOT / "recipes" / "convergence"
ROW = "| {row} | {seed} | "


@pytest.fixture(scope="module")
def status():
    return load("status.py")


def write_log(folder, losses: list[float], ended: bool, epochs=range(1, 9)) -> None:
    """A log of fairseq-train with these validation losses, half an hour for each epoch."""
    folder.mkdir(parents=True)
    lines = ["2026-01-01 | INFO | fairseq_cli.train | {not json"]
    for epoch, loss in zip(epochs, losses):
        valid = {"epoch": epoch, "valid_loss": str(loss), "valid_ppl": str(round(2 ** (loss - 1), 2))}
        lines += [f"x | INFO | train | {json.dumps({'epoch': epoch, 'train_train_wall': '1800'})}", f"x | {json.dumps(valid)}"]
    if ended:
        lines.append(f"{ENDED} (8e-05) is smaller than or equal to minimum learning rate")
        lines.append("2026-01-01 | INFO | fairseq_cli.train | done training in 9.0 seconds")
    (folder / "train.log").write_text("\n".join(lines) + "\n")


def curve_of(file, run) -> list[float]:
    """The validation perplexities of a run that a recipe has collected, which are those of its log, as the figures read them."""
    row, _, seed = run.name.rsplit("-", 2)
    [found] = results_script("figures/convergence.py").read_curves(file, int(seed), [row]).values()
    assert found == read_log(run / "train.log", "valid_ppl")
    return [*found.values()]


def test_status_of_runs(status, tmp_path, capsys):
    write_log(tmp_path / "a-1", [7.0, 6.0, 6.5], ended=True)
    write_log(tmp_path / "b-1", [7.0], ended=False)
    write_log(tmp_path / "c-1", [], ended=False)
    write_log(tmp_path / "d-1", [7.0, 5.0, 6.0], ended=False, epochs=(1, 2, 2))  # the second is within its epoch
    status.main(str(tmp_path))
    rows = [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[:4] for row in rows] == [
        ["a-1", "finished", "0", "32.00 (epoch 2)"],  # valid_ppl
        ["b-1", "interrupted", "0", "64.00 (epoch 1)"],
        ["c-1", "interrupted", "0", "0 seconds ago"],
        ["d-1", "interrupted", "0", "16.00 (epoch 2)"],
    ]
    status.main("--cells", str(tmp_path / "a-1"), "5.1", "")
    assert capsys.readouterr().out == "32.00 | 5.1 |  | 3 | 1.5\n"
    status.main("--cells", str(tmp_path / "d-1"))
    assert capsys.readouterr().out == "16.00 | 2 | 1.0\n"
    with pytest.raises(SystemExit, match="the log of c-1 has no validation loss"):
        status.main("--cells", str(tmp_path / "c-1"))
    status.main(str(tmp_path / "nothing"))
    assert capsys.readouterr().out == "no run has begun\n"


@pytest.mark.long
def test_language_models_and_conversion(tmp_path):
    out = tmp_path / "out_toy"
    done = recipe("convergence/conversion.sh", out, "decay-4-distilled")
    assert done.returncode == 1 and "softmax-0.1-1 is not finished; run recipes/convergence/language.sh softmax" in done.stderr
    done = recipe("convergence/conversion.sh", out, "decay-4-scratch")
    assert done.returncode == 1 and "words is not there; run recipes/convergence/language.sh with the same OUT first" in done.stderr
    printed = succeed(recipe("convergence/language.sh", out, "softmax"))
    best, segments, sliding, stream, epochs, _ = cells(printed, "softmax")
    assert min(map(float, (best, segments, sliding))) > 10 and stream == "" and int(epochs) > 3
    log = (out / "runs" / "language" / "softmax-0.1-1" / "train.log").read_text()
    assert ENDED in log
    assert (out / "language.txt").read_text() == f"softmax 0.1 1 {segments} {sliding} -\n"
    curve = curve_of(out / "language_curves.txt", out / "runs" / "language" / "softmax-0.1-1")
    assert len(curve) == int(epochs) and min(curve) == pytest.approx(float(best))
    printed = succeed(recipe("convergence/conversion.sh", out, "decay-4-distilled"))
    converted, validated, tuned, share, *_ = cells(printed, "decay-4-distilled")
    assert float(tuned) < float(converted) and share == ""
    printed = succeed(recipe("convergence/conversion.sh", out, "softmax", "decay-4-distilled"))
    before, best, softmax, share, epochs, _ = cells(printed, "softmax")
    assert before == segments and float(softmax) < float(segments) and share == "100.0%"
    curve = curve_of(out / "conversion_curves.txt", out / "runs" / "conversion" / "softmax-0.1-1")
    assert len(curve) == int(epochs) and min(curve) == pytest.approx(float(best))
    row = cells(printed, "decay-4-distilled")
    assert row[:3] == [converted, validated, tuned]
    assert float(row[3].strip("%")) == pytest.approx(100 * float(softmax) / float(tuned), abs=0.06)
    stamps = {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*.*") if path.is_file()}
    again = recipe("convergence/conversion.sh", out, "decay-4-distilled")
    assert cells(succeed(again), "decay-4-distilled") == row and "training" not in again.stderr
    assert stamps == {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*.*") if path.is_file()}
    shown = succeed(recipe("convergence/conversion.sh", out, "--status"))
    assert re.search(r"^decay-4-distilled-0.1-1 +finished ", shown, re.MULTILINE)
    printed = succeed(recipe("convergence/conversion.sh", out, "decay-4-scratch", SEEDS="2"))
    before, _, trained, share, *_ = cells(printed, "decay-4-scratch", seed=2)
    assert before == share == "" and float(trained) > 10  # of a seed without a Transformer


@pytest.mark.parametrize("command", ["{ echo 1.5; false; }", "true", "{ echo 1.5; kill -9 $BASHPID; }"])
def test_no_result_of_a_command_that_failed_is_kept(command, tmp_path):
    """In a command substitution, as the recipes ask for results; the next call asks again."""
    script = f"source recipes/lib.sh; source recipes/convergence/end.sh; result() {command.replace('true', '{ true; }')}\n"
    script += f"found=$(kept {tmp_path}/result result); echo found $found"
    done = subprocess.run(["bash", "-c", script, "some.sh"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode and not done.stdout and not (tmp_path / "result").exists()
    script = script.replace(command.replace("true", "{ true; }"), "{ echo 2.5; }")
    (tmp_path / "result").touch()  # an empty one, as earlier versions kept it
    for _ in range(2):
        assert subprocess.run(["bash", "-c", script, "some.sh"], cwd=ROOT, capture_output=True, text=True).stdout == "found 2.5\n"
        script = script.replace("2.5", "3.5")
    assert (tmp_path / "result").read_text() == "2.5\n"


@pytest.mark.long
def test_translations(tmp_path):
    """Two test sets and two dropouts, each of which has a run of its own; the scores are those of fairseq's translations."""
    out = tmp_path / "out_toy"
    parallel_text.write(tmp_path, train=60, val=4, test_2016_flickr=4, test_2017_flickr=5)
    given = {"DATA": str(tmp_path), "TEST": "test_2016_flickr test_2017_flickr"}
    first = recipe("convergence/translation.sh", out, "dpfp2-decoder", **given)
    best, epochs, _ = cells(succeed(first), "dpfp2-decoder")
    curve = curve_of(out / "translated_curves.txt", out / "runs" / "dpfp2-decoder-0.1-1")
    assert len(curve) == int(epochs) > 3 and min(curve) == pytest.approx(float(best))
    run = out / "runs" / "dpfp2-decoder-0.1-1"
    wanted = []
    for name in ("test", "test1"):
        [bleu, split] = (run / f"bleu-{name}.txt").read_text().split()
        text, reference = ((folder / f"{name}.de").read_text().splitlines() for folder in (run, out / "raw"))
        assert float(bleu) == pytest.approx(corpus_bleu(text, [reference], lowercase=True).score, abs=0.01)
        wanted.append(f"dpfp2-decoder 0.1 1 {name} {bleu} {split}")
    assert (out / "translated.txt").read_text().splitlines() == wanted
    assert [*results_script("figures/convergence.py").read_translated(out / "translated.txt")] == ["dpfp2-decoder"]
    again = recipe("convergence/translation.sh", out, "dpfp2-decoder", **given)
    succeed(again)
    assert again.stdout == first.stdout and "training" not in again.stderr
    shown = succeed(recipe("convergence/translation.sh", out, "--status"))
    assert re.search(r"^dpfp2-decoder-0.1-1 +finished ", shown, re.MULTILINE)
    other = recipe("convergence/translation.sh", out, "dpfp2-decoder", DROPOUT="0", **given)
    succeed(other)
    assert f"training in {out}/runs/dpfp2-decoder-0-1;" in other.stderr
    assert {*results_script("figures/convergence.py").read_translated(out / "translated.txt")} == {
        "dpfp2-decoder, dropout 0.1",
        "dpfp2-decoder, dropout 0",
    }


def cells(printed: str, row: str, seed: int = 1) -> list[str]:
    [line] = [line for line in printed.splitlines() if line.startswith(ROW.format(row=row, seed=seed))]
    return [cell.strip() for cell in line.strip("|").split("|")][2:]


@pytest.mark.parametrize("row", ["softmax-stream", "hebb", "sru-other", "sru-parts"])
def test_rows_that_are_none(row, tmp_path):
    done = recipe("convergence/language.sh", tmp_path / "out_toy", row)
    assert done.returncode == 1 and f"ROW is {row}; it must be one of additive additive_all comba decay " in done.stderr
    done = recipe("convergence/conversion.sh", tmp_path / "out_toy", "leap-4")
    assert done.returncode == 1 and "ROW is leap-4; it must be softmax, RULE-M, " in done.stderr


@pytest.fixture
def write_words(tmp_path):
    """Returns what writes a log of these words and scores in pieces, in any order and between lines of other kinds."""

    def write(name: str, words: list[tuple[str, float]], size: int) -> str:
        lines = ["INFO:fairseq_cli.eval_lm:Loss (base 2): 7.1, Perplexity: 140", "INFO:fairseq_cli.eval_lm:3 tokens [x]"]
        for number, start in reversed(list(enumerate(range(0, len(words), size)))):
            piece = "\t".join(f"{word} [{score:2f}]" for word, score in words[start : start + size])
            lines.append(f"2026-01-01 00:00:00 | INFO | fairseq_cli.eval_lm | {number} {piece}")
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        return str(tmp_path / name)

    return write


def test_spans_of_a_stream_beside_segments(write_words, tmp_path, capsys):
    """The last span is half full at least."""
    words = load("convergence/words.py")
    stream = write_words("stream.log", [(f"w[{i}", -0.1 * i) for i in range(24)], 5)
    segments = write_words("segments.log", [(f"w[{i}", -0.2 * i) for i in range(24)], 7)
    words.by_length(stream, segments, "8")
    want = [(8, 0, 8), (16, 8, 16), (24, 16, 24)]
    assert capsys.readouterr().out.splitlines() == [
        f"{end} " + " ".join(f"{math.exp(factor * sum(range(a, b)) / (b - a)):.3f}" for factor in (0.1, 0.2)) for end, a, b in want
    ]
    assert words.spans(24, 8) == [(0, 8), (8, 16), (16, 24)] and words.spans(23, 8) == [(0, 8), (8, 16)] and words.spans(3, 8) == []
    write_words("segments.log", [(f"w[{i}" if i != 4 else "other", -0.2 * i) for i in range(24)], 7)
    with pytest.raises(SystemExit, match=r"have other words; both must be of the same text$"):
        words.by_length(stream, segments, "8")
    (tmp_path / "stream.log").write_text("nothing\n")
    with pytest.raises(SystemExit, match=r"stream\.log has no words; it must be a log of fairseq-eval-lm --output-word-probs$"):
        words.by_length(stream, segments, "8")


def test_spans_of_places_in_segments(write_words, capsys):
    """Two segments of 8 words, and a last one of 3, which counts at its places only."""
    words = load("convergence/words.py")
    segments = write_words("segments.log", [("w", -0.1 * i) for i in range(19)], 8)
    words.by_position(segments, "8")
    places = {1: (0, 8, 16), 2: (1, 9, 17), 4: (2, 3, 10, 11, 18), 8: (4, 5, 6, 7, 12, 13, 14, 15)}
    assert capsys.readouterr().out.splitlines() == [f"{end} {math.exp(0.1 * sum(at) / len(at)):.3f}" for end, at in places.items()]
    with pytest.raises(SystemExit, match=r"segments\.log has segments of another length than 7$"):
        words.by_position(segments, "7")


@pytest.mark.long
@torch.no_grad()
def test_length_of_a_finished_row(tmp_path):
    """Against one pass over the whole text, and one over each segment."""
    out, row = tmp_path / "out_toy", "delta_elu-stream"
    done = recipe("convergence/length.sh", out, row)
    assert (
        done.returncode == 1 and f"{row}-0.1-1 is not finished; run recipes/convergence/language.sh {row} with the" in done.stderr
    )
    succeed(recipe("convergence/language.sh", out, row))
    [line] = (out / "language.txt").read_text().splitlines()
    assert line.startswith(f"{row} 0.1 1 ") and all(float(value) > 10 for value in line.split()[3:]) and len(line.split()) == 6
    printed = succeed(recipe("convergence/length.sh", out, row))
    found = [line.split() for line in (out / "length.txt").read_text().splitlines()]
    assert [(name, dropout, seed, int(end)) for name, dropout, seed, end, *_ in found] == [
        (row, "0.1", "1", end) for end in (32, 64, 128, 256, 512, 1024, int(found[-1][3]))
    ]
    utils.import_user_module(Namespace(user_dir=str(ROOT / "fw_fairseq")))
    run = out / "runs" / "language" / f"{row}-0.1-1"
    [model], _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(run / "checkpoint_best.pt")], {"data": str(out / "words")}
    )
    text = torch.cat(list(data_utils.load_indexed_dataset(str(out / "words" / "test"), task.source_dictionary))).long()
    model = model.double().eval()

    def scores(tokens: torch.Tensor) -> torch.Tensor:
        logits = model(tokens[None, :-1])[0][0]
        return -logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]

    text = torch.cat([torch.tensor([task.source_dictionary.eos()]), text])
    whole = scores(text)
    pieces = torch.cat([scores(text[start : start + 33]) for start in range(0, len(text) - 1, 32)])
    start, cells = 0, []
    for *_, end, stream, segments in found:
        values = [part[start : int(end)].mean().exp().item() for part in (whole, pieces)]
        assert [float(stream), float(segments)] == pytest.approx(values, rel=1e-3)
        cells.append(values[0] / values[1])
        start = int(end)
    [line] = [line for line in printed.splitlines() if line.startswith(f"| {row} | 1 |")]
    assert [float(cell) for cell in line.strip("| ").split("|")[3:]] == pytest.approx(cells[1:], abs=0.002)
    again = recipe("convergence/length.sh", out, row)
    assert succeed(again) == printed and len((out / "length.txt").read_text().splitlines()) == len(found)
    succeed(recipe("convergence/position.sh", out, row))
    places = [line.split() for line in (out / "position.txt").read_text().splitlines()]
    assert [place[:4] for place in places] == [[row, "0.1", "1", str(end)] for end in (1, 2, 4, 8, 16, 32)]
    at = torch.arange(len(pieces)) % 32
    for *_, end, value in places:
        span = (at < int(end)) & (at >= int(end) // 2)
        assert float(value) == pytest.approx(pieces[span].mean().exp().item(), rel=1e-3)


@pytest.mark.parametrize("arguments", [["softmax-nopos"], ["delta_elu"], [], ["delta_elu-stream", "--dropout", "0"]])
def test_rows_without_a_length(arguments, tmp_path):
    done = recipe("convergence/length.sh", tmp_path / "out_toy", *arguments)
    assert done.returncode == 1 and (
        "that ends in -stream or -nopos" in done.stderr or "--dropout has no effect here" in done.stderr
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "ROW is missing; it must be a row of language.sh, for example softmax"),
        (["softmax", "--dropout", "0"], "--dropout has no effect here; leave it out"),
        (["softmax"], "softmax-0.1-1 is not finished; run recipes/convergence/language.sh softmax with the same OUT"),
    ],
)
def test_rows_without_a_position(arguments, message, tmp_path):
    done = recipe("convergence/position.sh", tmp_path / "out_toy", *arguments)
    assert done.returncode == 1 and message in done.stderr
