"""A converted checkpoint in fairseq's own commands: fine-tuned, restored, evaluated, loaded; and the recipes at toy size."""

from __future__ import annotations

import random
import re

import pytest
import torch
from commands import USER_DIR, fairseq, succeed

from fw_fairseq.convert import convert
from fw_fairseq.models.fast_weight_lm import FastWeightLanguageModel

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = (
    "--task language_modeling --tokens-per-sample 24 --batch-size 8 --decoder-layers 2 --decoder-embed-dim 32"
    " --decoder-input-dim 32 --decoder-output-dim 32 --decoder-ffn-embed-dim 64 --decoder-attention-heads 4"
    " --decoder-normalize-before --optimizer adam --lr 0.005 --no-epoch-checkpoints --log-format simple --log-interval 1 --seed 1"
)
CONVERTED = "--arch fast_weight_lm --update-rule decay --feature-map identity --feature-norm none --feature-dim 4"


def train(data, folder, *args) -> str:
    return succeed(fairseq("train", data, *USER_DIR, *SHAPE.split(), "--save-dir", folder, *args))


def perplexity(data, checkpoint) -> float:
    options = ("--task", "language_modeling", "--tokens-per-sample", 24, "--path", checkpoint)
    printed = succeed(fairseq("eval_lm", data, *USER_DIR, *options))
    return float(re.search(r"Perplexity: ([\d.]+)", printed)[1])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Words that count up, from a word drawn at random: attention or a memory sees what comes next."""
    folder, draw = tmp_path_factory.mktemp("counting"), random.Random(0)
    for split, count in {"train": 200, "valid": 20, "test": 40}.items():
        starts = [draw.randrange(40) for _ in range(count)]
        (folder / split).write_text("".join(" ".join(f"w{(s + i) % 40}" for i in range(11)) + "\n" for s in starts))
    prefixes = [part for split in ("train", "valid", "test") for part in (f"--{split}pref", folder / split)]
    succeed(fairseq("preprocess", "--only-source", *prefixes, "--destdir", folder / "bin"))
    return folder / "bin"


@pytest.fixture(scope="module")
def pretrained(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained")
    train(data, folder, "--arch", "transformer_lm", "--max-update", 40)
    return folder / "checkpoint_last.pt"


def test_finetuning_goes_on_from_the_converted_model(data, pretrained, tmp_path):
    convert(pretrained, tmp_path / "start.pt", "decay", feature_dim=4)
    convert(pretrained, tmp_path / "softmax.pt", "softmax")
    assert perplexity(data, tmp_path / "softmax.pt") == pytest.approx(perplexity(data, pretrained), abs=0.01)
    start = perplexity(data, tmp_path / "start.pt")
    log = train(data, tmp_path / "tuned", *CONVERTED.split(), "--max-update", 15, "--finetune-from-model", tmp_path / "start.pt")
    assert "reset" in log and perplexity(data, tmp_path / "tuned" / "checkpoint_best.pt") < start
    train(data, tmp_path / "restored", *CONVERTED.split(), "--max-update", 1, "--restore-file", tmp_path / "start.pt", "--lr", 0)
    before, after = (torch.load(path, weights_only=True)["model"] for path in (
        tmp_path / "start.pt", tmp_path / "restored" / "checkpoint_last.pt"))  # fmt: skip
    assert all(torch.equal(x, after[name]) for name, x in before.items() if "version" not in name)
    model = FastWeightLanguageModel.from_pretrained(str(tmp_path), "start.pt", data_name_or_path=str(data)).eval()
    assert model.score("w1 w2 w3")["positional_scores"].isfinite().all()
