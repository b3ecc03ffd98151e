"""What logs say: few numbers in a line, the layers' in a file, shared parameters that are there, and how far an evaluation is."""

from __future__ import annotations

import json
import logging

import pytest
from fairseq import options, trainer
from fairseq.logging import progress_bar
from support.commands import USER_DIR, fairseq, succeed
from torch import nn

import fw_fairseq.models  # noqa: F401
from fw_fairseq.errors import Mistake
from fw_fairseq.patches import progress
from fw_fairseq.tools.plot.logs import read_log

STATS = {"loss": 2.0, "ppl": 4.0, "num_updates": 100, "fw_0_gate": 0.5, "fw_1_gate": 0.25}


@pytest.mark.parametrize("kind", ["json", "simple"])
def test_numbers_of_layers_are_in_a_file(kind, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        bar = progress_bar.progress_bar([1, 2], kind, 100, epoch=3, aim_param_checkpoint_dir=str(tmp_path))
        for _ in bar:
            bar.log(STATS, tag="train_inner", step=100)
            break
        bar.print(STATS, tag="train", step=100)
    assert "ppl" in caplog.text and "fw_" not in caplog.text and STATS["fw_0_gate"] == 0.5
    lines = [json.loads(line) for line in (tmp_path / "layers.jsonl").read_text().splitlines()]
    assert lines == [
        {"epoch": 3, "num_updates": "100", "fw_0_gate": "0.5", "fw_1_gate": "0.25"},
        {"epoch": 3, "train_num_updates": "100", "train_fw_0_gate": "0.5", "train_fw_1_gate": "0.25"},
    ]
    (tmp_path / "train.log").write_text(caplog.text)
    assert read_log(tmp_path / "train.log", "fw_1_gate") == {100: 0.25}


def test_without_a_save_directory_they_stay_in_the_log(caplog):
    with caplog.at_level(logging.INFO):
        progress_bar.progress_bar([1], "simple").print(STATS, tag="valid")
    assert "fw_1_gate 0.25" in caplog.text


def test_shared_parameters_are_parameters():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    assert trainer._catalog_shared_params(model) == []
    model[1].weight = model[0].weight
    assert trainer._catalog_shared_params(model) == [["0.weight", "1.weight"]]


def test_an_evaluation_says_how_far_it_is(monkeypatch, caplog):
    """First after ten seconds, then once a minute."""
    clock = iter(range(0, 1000, 8))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    batches = progress.Announced([{"ntokens": 500}] * 20, 10000)
    with caplog.at_level(logging.INFO):
        assert len(list(batches)) == len(batches) == 20
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "evaluated 1,000 of 10,000 words, 62 words/s, 2 minutes left",
        "evaluated 4,500 of 10,000 words, 62 words/s, 1 minutes left",
        "evaluated 8,500 of 10,000 words, 62 words/s, 0 minutes left",
    ]


@pytest.mark.parametrize("given", [["--fp16", "--bf16"], ["--memory-efficient-bf16", "--fp16"]])
def test_two_precisions_exclude_each_other(given):
    with pytest.raises(Mistake, match=r"^--fp16 and --bf16 exclude each other, .*; give one of them$"):
        options.parse_args_and_arch(options.get_training_parser("language_modeling"), ["data", "--arch", "transformer_lm", *given])


def test_a_log_begins_with_the_command(stream_data, tmp_path):
    """And has neither the options that nobody gave, nor the modules, nor advice about fairseq's code."""
    options = ["--arch", "fast_weight_lm_small", "--task", "stateful_language_modeling", "--tokens-per-sample", "16"]
    options += ["--batch-size", "2", "--save-dir", tmp_path / "run", "--lr", "0.001", "--optimizer", "adam", "--max-update", "1"]
    log = succeed(fairseq("train", stream_data, *USER_DIR, *options))
    said = [line.partition(" | INFO | fairseq_cli.train | ")[2] for line in log.splitlines()]
    first = next(line for line in said if line)
    assert str(stream_data) in first and first.endswith("--max-update 1")
    for noise in ("Warning", "'dataset': {", "(decoder): ", "hydra"):
        assert noise not in log
