"""pretrained_lm through fairseq's commands: train, resume and evaluate, the last without the folder that it came from."""

from __future__ import annotations

import random
import re
import shutil

import pytest
import torch
from fairseq import checkpoint_utils
from support.commands import USER_DIR, fairseq, succeed
from support.pretrained_models import ARCHITECTURES, make, symbols, texts

from fw_fairseq.pretrained.folders import symbols_of, write_dictionary

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.long]

TRAIN = (
    "--arch pretrained_lm --update-rule gated_delta --mixer-pattern softmax,fast_weight*2 --memory-window 4"
    " --criterion fast_weight_cross_entropy --tokens-per-sample 16 --batch-size 4 --optimizer adam --lr 0.003 --seed 1"
    " --no-epoch-checkpoints --num-workers 0"
)

ADAPTERS = "--train-only adapters --adapter-rank 2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama, a text in its tokens, and the binarised text."""
    path = tmp_path_factory.mktemp("pretrained")
    model = make("llama")
    model.save_pretrained(path / "model")
    write_dictionary(model.config, path / "dict.txt")
    words, random_ = symbols_of(model.config), random.Random(1)
    for split in ("train", "valid", "test"):
        lines = [" ".join(random_.choices(words, k=20)) for _ in range(12)]
        (path / split).write_text("\n".join(lines) + "\n")
    given = [f"--{split}pref={path / split}" for split in ("train", "valid", "test")]
    given += ["--srcdict", path / "dict.txt", "--destdir", path / "bin"]
    succeed(fairseq("preprocess", *USER_DIR[:2], "--only-source", *given))
    return path


def train(folder, output, *options, task="language_modeling") -> None:
    given = ["--task", task, "--save-dir", output, *options]
    succeed(fairseq("train", folder / "bin", *USER_DIR, *given, *TRAIN.split()))


def load(path):
    return checkpoint_utils.load_model_ensemble([str(path)])[0][0].eval()


def resumed(folder, source, place, *options, task="language_modeling"):
    """A whole run and one that was resumed, which have the same model, and load without the folder that they came from."""
    given = ["--pretrained", source, *options]
    train(folder, place / "whole", "--max-update", "6", *given, task=task)
    train(folder, place / "parts", "--max-update", "3", *given, task=task)
    train(folder, place / "parts", "--max-update", "6", *given, task=task)
    shutil.rmtree(source)
    whole, parts = (load(place / run / "checkpoint_last.pt") for run in ("whole", "parts"))
    tokens = symbols(whole, texts())
    with torch.no_grad():
        torch.testing.assert_close(whole(tokens)[0], parts(tokens)[0], rtol=0, atol=0)
    return whole


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "llama"])
def test_a_resumed_run_of_each_architecture_is_the_whole_run(name, folder, tmp_path):
    before = make(name)
    before.save_pretrained(tmp_path / "model")
    now = dict(resumed(folder, tmp_path / "model", tmp_path).decoder.model.named_parameters())
    assert not any(torch.equal(now[key], x) for key, x in before.named_parameters() if x.dim() == 2)


@pytest.mark.parametrize(
    "task, options",
    [("language_modeling", ""), ("stateful_language_modeling", "--checkpoint-activations"), ("language_modeling", ADAPTERS)],
    ids=["segments", "stream", "adapters"],
)
def test_a_resumed_run_is_the_whole_run_and_a_checkpoint_stands_alone(task, options, folder, tmp_path):
    source = shutil.copytree(folder / "model", tmp_path / "model")
    whole = resumed(folder, source, tmp_path, *options.split(), task=task)
    now, before = dict(whole.decoder.model.named_parameters()), dict(make("llama").named_parameters())
    assert {torch.equal(now[key], x) for key, x in before.items()} == {options == ADAPTERS}
    assert all(x.any() for key, x in now.items() if key.endswith(".adapter.left"))
    options = ["--path", tmp_path / "whole" / "checkpoint_last.pt", "--gen-subset", "test", "--tokens-per-sample", "16"]
    printed = succeed(fairseq("eval_lm", folder / "bin", *USER_DIR, "--task", task, "--batch-size", "1", *options))
    assert float(re.search(r"Perplexity: ([\d.]+)", printed)[1]) > 1


def test_generated_words_are_those_of_a_pass_over_all(folder, tmp_path):
    train(folder, tmp_path, "--max-update", "2", "--pretrained", folder / "model")
    options = ["--path", tmp_path / "checkpoint_last.pt", "--gen-subset", "test", "--sample-break-mode", "eos"]
    options += ["--prefix-size", "5", "--beam", "1", "--max-len-b", "12", "--batch-size", "4", "--task", "language_modeling"]
    printed = succeed(fairseq("generate", folder / "bin", *USER_DIR, *options))
    found = dict(line.split("\t")[0::2] for line in printed.splitlines() if line.startswith("H-"))
    model = load(tmp_path / "checkpoint_last.pt")
    words = model.decoder.dictionary
    for number, line in enumerate((folder / "test").read_text().splitlines()):
        text = [words.eos(), *(words.index(word) for word in line.split()[:5])]
        while len(text) < 13 and text[-1] != words.eos():
            with torch.no_grad():
                last = model(torch.tensor([text]))[0][0, -1]
            last[[words.bos(), words.pad()]] = -torch.inf  # which fairseq never generates
            text.append(int(last.argmax()))
        assert found[f"H-{number}"].split() == [words[symbol] for symbol in text[1:] if symbol != words.eos()]
