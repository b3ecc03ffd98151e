"""Checkpoints of this environment's fairseq are read by another environment's. tests/compatibility.sh 3.10 names that."""

from __future__ import annotations

import os
import re

import pytest
from support import lm_data, parallel_text
from support.commands import USER_DIR, fairseq, run, succeed

OTHER = os.environ.get("FW_OTHER_PYTHON")
pytestmark = pytest.mark.skipif(OTHER is None, reason="FW_OTHER_PYTHON names no other environment")
OPTIONS = "--optimizer adam --lr 0.01 --max-update 20 --batch-size 16 --no-epoch-checkpoints --num-workers 0"
TRAIN = [*USER_DIR, *OPTIONS.split()]
TRANSFORMER = (
    "--arch fast_weight_transformer --encoder-layers 1 --decoder-layers 1 --encoder-embed-dim 32 --decoder-embed-dim 32"
    " --encoder-ffn-embed-dim 64 --decoder-ffn-embed-dim 64 --encoder-attention-heads 4 --decoder-attention-heads 4"
)


def read_by_both(tool: str, *args) -> tuple[str, str]:
    """The last line that the tool prints here, and there."""
    here = succeed(fairseq(tool, *args, *USER_DIR))
    there = succeed(run(os.path.abspath(OTHER), "-m", f"fairseq_cli.{tool}", *args, *USER_DIR))
    return here, there


@pytest.mark.parametrize("task", ["language_modeling", "stateful_language_modeling"])
def test_language_model(task, tmp_path):
    lm_data.binarise(tmp_path)
    task = ["--task", task, "--tokens-per-sample", 16]
    succeed(fairseq("train", tmp_path / "bin", *lm_data.SMALL.split(), *task, *TRAIN, "--save-dir", tmp_path))
    checkpoint = ["--path", tmp_path / "checkpoint_last.pt", "--batch-size", 4]
    printed = read_by_both("eval_lm", tmp_path / "bin", *checkpoint, *task)
    here, there = (float(re.search(r"Loss \(base 2\): ([\d.]+)", text)[1]) for text in printed)
    assert here == pytest.approx(there, abs=2e-4)
    there = run(os.path.abspath(OTHER), "-m", "fairseq_cli.train", tmp_path / "bin", *lm_data.SMALL.split(), *task, *TRAIN,
                "--save-dir", tmp_path, "--max-update", 25)  # fmt: skip
    assert "Loaded checkpoint" in succeed(there) and re.search(r"Stopping training due to num_updates: 25", succeed(there))


@pytest.mark.parametrize("linear", ["encoder,decoder,cross", ""])
def test_translation(linear, tmp_path):
    parallel_text.write(tmp_path, train=200, valid=20, test=20)
    prefixes = [part for split in ("train", "valid", "test") for part in (f"--{split}pref", tmp_path / split)]
    languages = ["--source-lang", "en", "--target-lang", "de"]
    succeed(fairseq("preprocess", *languages, *prefixes, "--destdir", tmp_path / "bin", "--joined-dictionary"))
    options = [*TRANSFORMER.split(), "--linear-attention", linear, "--dropout", 0, "--criterion", "label_smoothed_cross_entropy"]
    succeed(fairseq("train", tmp_path / "bin", *options, *TRAIN, "--save-dir", tmp_path))
    printed = read_by_both("generate", tmp_path / "bin", "--path", tmp_path / "checkpoint_last.pt", "--batch-size", 20)
    here, there = (sorted(re.findall(r"^[HP]-\d+.*$", text, re.MULTILINE)) for text in printed)
    words, scores = zip(*(([re.sub(r"-?\d+\.\d+", "", line) for line in lines], numbers(lines)) for lines in (here, there)))
    assert len(here) == 40 and words[0] == words[1]
    assert scores[0] == pytest.approx(scores[1], abs=2e-3)


def numbers(lines: list[str]) -> list[float]:
    return [float(x) for line in lines for x in re.findall(r"-?\d+\.\d+", line)]
