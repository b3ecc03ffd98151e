"""Every mixer but fast weights through fairseq's commands, six in one model: train, stream, generate."""

from __future__ import annotations

import re

import pytest
from support.commands import USER_DIR, fairseq, succeed
from support.runs import losses
from support.streams import evaluate, train, training

import fw_fairseq.models  # noqa: F401
from fw_fairseq.mixers import MIXERS

ADDITIVE = ["--arch", "additive_lm", "--batch-size", 2, "--tokens-per-sample", 16]
pytestmark = pytest.mark.usefixtures("one_thread")


NAMES = [name for name in MIXERS if name != "fast_weight"]
CASES = [
    ["--mixer-pattern", ",".join(NAMES[i : i + 6]), "--decoder-layers", len(NAMES[i : i + 6])] for i in range(0, len(NAMES), 6)
]


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("options", CASES, ids=lambda options: options[1])
def test_trains_resumes_streams_and_generates(stream_data, tmp_path, options):
    log = train(stream_data, tmp_path, *options)
    train(stream_data, tmp_path / "parts", *options, "--max-update", 2)
    resumed = losses(train(stream_data, tmp_path / "parts", *options))
    assert resumed == {update: loss for update, loss in losses(log).items() if update > 2}
    assert float(losses(log)[6]) < float(losses(log)[1])
    checkpoint, streaming = tmp_path / "checkpoint_last.pt", ["--task", "stateful_language_modeling", "--batch-size", 1]
    short, long = (evaluate(stream_data, checkpoint, *streaming, "--tokens-per-sample", length) for length in (7, 50))
    assert short == long
    generate = ["--gen-subset", "test", "--sample-break-mode", "eos", "--batch-size", 4, "--prefix-size", 2, "--max-len-b", 8]
    task = ["--task", "language_modeling", "--path", checkpoint, *generate]
    printed = succeed(fairseq("generate", stream_data, *USER_DIR, *task, "--beam", 3))
    assert printed.count("H-") == int(re.search(r"Translated (\d+) sentences", printed)[1]) > 5


def test_a_penalty_on_the_memories_needs_fast_weights(stream_data, tmp_path):
    options = [*training(stream_data, tmp_path, "--mixer", "sru"), "--state-norm-penalty", 0.1]
    done = fairseq("train", *options, *USER_DIR)
    assert done.returncode and "--state-norm-penalty needs fast-weight layers" in done.stderr


def test_windows_are_refused_in_one_sentence(stream_data, tmp_path):
    done = fairseq("train", stream_data, *USER_DIR, *ADDITIVE, "--task", "language_modeling", "--window-sizes", "4,x")
    assert done.returncode and "--window-sizes has 'x'; each part must be a number of tokens" in done.stderr
