"""stateful_language_modeling and fast_weight_cross_entropy through fairseq's commands."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
MODEL = [
    "--arch",
    "fast_weight_lm",
    "--decoder-layers",
    "2",
    "--decoder-embed-dim",
    "32",
    "--decoder-input-dim",
    "32",
    "--decoder-output-dim",
    "32",
]
MODEL += ["--decoder-ffn-embed-dim", "64", "--decoder-attention-heads", "4", "--no-token-positional-embeddings", "--dropout", "0.1"]
TRAIN = [
    "--task",
    "stateful_language_modeling",
    "--criterion",
    "fast_weight_cross_entropy",
    "--tokens-per-sample",
    "16",
    "--batch-size",
    "4",
]
TRAIN += [
    "--batch-size-valid",
    "3",
    "--optimizer",
    "adam",
    "--lr",
    "0.01",
    "--seed",
    "3",
    "--cpu",
    "--log-format",
    "json",
    "--log-interval",
    "1",
]
TRAIN += ["--no-epoch-checkpoints", "--max-update", "6"]


def fairseq(tool, *args):
    command = [sys.executable, "-m", f"fairseq_cli.{tool}", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def train(data, folder, *args):
    done = fairseq("train", data, "--user-dir", ROOT / "fw_fairseq", *MODEL, *TRAIN, "--save-dir", folder, *args)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if "train_inner" in line and "{" in line]
    return {int(log["num_updates"]): log for log in map(json.loads, lines)}


def evaluate(data, checkpoint, *args):
    options = ["--user-dir", ROOT / "fw_fairseq", "--path", checkpoint, "--gen-subset", "test", "--cpu", *args]
    done = fairseq("eval_lm", data, *options)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(re.search(r"Evaluated ([\d,]+)", done.stderr)[1].replace(",", "")), float(
        re.search(r"2\): ([\d.]+)", done.stderr)[1]
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    words, rng = [f"word{i}" for i in range(40)], random.Random(0)
    for split, lines in (("train", 60), ("valid", 12), ("test", 12)):
        text = [" ".join(rng.choice(words[i % 20 :]) for i in range(rng.randint(3, 15))) for _ in range(lines)]
        (folder / split).write_text("\n".join(text) + "\n")
    prefixes = [x for split in ("train", "valid", "test") for x in (f"--{split}pref", folder / split)]
    assert fairseq("preprocess", "--only-source", *prefixes, "--destdir", folder / "bin").returncode == 0
    return folder / "bin"


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder / "checkpoint_last.pt", train(data, folder)


def test_resume_goes_on_with_the_streams_memory(data, trained, tmp_path):
    checkpoint, whole = trained
    train(data, tmp_path, "--max-update", "3")
    resumed = train(data, tmp_path)
    assert sorted(resumed) == [4, 5, 6]
    assert [resumed[n]["loss"] for n in (4, 5, 6)] == [whole[n]["loss"] for n in (4, 5, 6)]
    torch.serialization.add_safe_globals([__import__("argparse").Namespace])
    one, other = (torch.load(path, weights_only=True)["model"] for path in (checkpoint, tmp_path / "checkpoint_last.pt"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    saved = torch.load(checkpoint, weights_only=True)["extra_state"]["train_iterator"]
    assert sorted(saved["carried"]) == [0, 1] and saved["iterations_in_epoch"] == 6


def test_gates_and_state_norms_are_logged(trained):
    _, logs = trained
    for layer in (0, 1):
        assert 0 < float(logs[6][f"fw_{layer}_gate_beta"]) < 1
        assert float(logs[6][f"fw_{layer}_write_strength"]) == float(logs[6][f"fw_{layer}_gate_beta"])
        assert float(logs[6][f"fw_{layer}_state_norm"]) > 0


@pytest.mark.parametrize("extra", [[], ["--reset-at-eos"]])
def test_streaming_perplexity_does_not_depend_on_the_segment(data, trained, extra):
    results = [
        evaluate(data, trained[0], "--task", "stateful_language_modeling", "--tokens-per-sample", t, "--batch-size", 1, *extra)
        for t in (5, 64)
    ]
    assert results[0] == results[1]
    if not extra:
        recomputed = evaluate(data, trained[0], "--task", "language_modeling", "--tokens-per-sample", 1000)
        assert recomputed == results[0]  # the whole text as one sample


@pytest.mark.parametrize("context", [0, 13])
def test_sliding_windows_score_as_fairseqs_do(data, trained, context):
    options = ["--tokens-per-sample", 16, "--context-window", context]
    one_by_one = evaluate(data, trained[0], "--task", "language_modeling", *options)
    at_once = evaluate(data, trained[0], "--task", "sliding_language_modeling", *options, "--batch-size", 7)
    assert at_once[0] == one_by_one[0]
    assert abs(at_once[1] - one_by_one[1]) < 2e-4


def test_a_prompt_in_one_pass_goes_on_as_a_prompt_in_steps(data, trained):
    """Prompts of unequal length, beam search; the generator that reads prompts at once against fairseq's own."""
    prompts = "word1 word2 word3 word4\nword5 word6\n"

    def continue_(task):
        command = [sys.executable, "-m", "fairseq_cli.interactive", data, "--user-dir", ROOT / "fw_fairseq", "--path", trained[0]]
        options = f"--task {task} --cpu --beam 3 --max-len-b 9 --buffer-size 2 --batch-size 2".split()
        done = subprocess.run([*map(str, command), *options], input=prompts, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        return [line for line in done.stdout.splitlines() if line[:2] in ("H-", "P-")]

    lines = continue_("stateful_language_modeling")
    assert lines == continue_("language_modeling")
    assert "word1 word2 word3 word4 " in lines[0] and "word5 word6 " in lines[2]


def test_a_prompt_is_read_once(monkeypatch):
    """Two beams of a prompt of 30 tokens and 5 new ones: one pass over the prompt, then one token a step."""
    from argparse import Namespace

    from fairseq import utils
    from fairseq.data import Dictionary

    utils.import_user_module(Namespace(user_dir=str(ROOT / "fw_fairseq")))
    from fw_fairseq.mixers import FastWeight
    from fw_fairseq.models.fast_weight_lm import FastWeightDecoder, FastWeightLanguageModel, FastWeightLanguageModelConfig
    from fw_fairseq.tasks.generation import PromptedGenerator

    dictionary = Dictionary()
    for i in range(20):
        dictionary.add_symbol(f"word{i}")
    args = Namespace(**{n: f.default for n, f in FastWeightLanguageModelConfig.__dataclass_fields__.items()})
    args.no_token_positional_embeddings, args.max_target_positions, args.tokens_per_sample = True, 64, 64
    args.decoder_layers_to_keep, args.decoder_layers = None, 1
    embedding = torch.nn.Embedding(len(dictionary), args.decoder_embed_dim, dictionary.pad())
    model = FastWeightLanguageModel(FastWeightDecoder(args, dictionary, embedding, no_encoder_attn=True)).eval()
    lengths, forward = [], FastWeight.forward
    monkeypatch.setattr(FastWeight, "forward", lambda self, x, *rest: lengths.append(len(x)) or forward(self, x, *rest))
    generator = PromptedGenerator([model], dictionary, beam_size=2, max_len_a=0, max_len_b=36)
    prompt = torch.randint(4, 24, (1, 30))
    generator.generate([model], {"net_input": {"src_tokens": prompt, "src_lengths": torch.tensor([30])}}, prefix_tokens=prompt)
    assert lengths[0] == 31 and set(lengths[1:]) == {1} and len(lengths) <= 8


def test_penalty_and_accumulation_and_adaptive_softmax(data, tmp_path):
    free = train(data, tmp_path / "free", "--update-freq", 2, "--max-update", 3)
    held = train(data, tmp_path / "held", "--update-freq", 2, "--max-update", 3, "--state-norm-penalty", 10)
    assert float(held[3]["fw_1_state_norm"]) < float(free[3]["fw_1_state_norm"])
    cutoffs = ["--adaptive-input-cutoff", "10,20", "--adaptive-softmax-cutoff", "10,20"]
    logs = train(data, tmp_path / "adaptive", "--adaptive-input", *cutoffs, "--tie-adaptive-weights", "--max-update", 2)
    assert "fw_0_state_norm" in logs[2]


def test_mistakes(data, trained, tmp_path):
    options = ["--user-dir", ROOT / "fw_fairseq", "--task", "stateful_language_modeling", "--cpu"]
    done = fairseq("eval_lm", data, *options, "--path", trained[0], "--tokens-per-sample", 32, "--context-window", 16)
    assert done.returncode and "--context-window recomputes context" in done.stderr.splitlines()[-1]
    done = fairseq("train", data, *options, *MODEL, *TRAIN, "--save-dir", tmp_path, "--batch-size", 9999)
    assert done.returncode and "--batch-size is 9999" in done.stderr.splitlines()[-1]
    done = fairseq(
        "train", data, *options, *MODEL, *TRAIN, "--save-dir", tmp_path, "--state-norm-penalty", 1, "--checkpoint-activations"
    )
    assert done.returncode and "does not work with --checkpoint-activations" in done.stderr.splitlines()[-1]
    assert not list(tmp_path.glob("checkpoint*.pt"))
