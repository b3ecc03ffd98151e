"""The files of fw_fairseq 0.1.0 in files/first_generation load, and compute what they computed when they were written."""

from __future__ import annotations

import json
import re
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils, utils
from fairseq.models import MODEL_REGISTRY
from support.commands import ROOT, USER_DIR, fairseq, succeed
from support.runs import updates

FILES = Path(__file__).parent / "files" / "first_generation"
LANGUAGE_MODELS = """delta_dpfp decay_adaptive gated_delta_softmax gated_relu sum_favor fwm additive_leap sru_srupp local_xl
linformer_abc stopped converted""".split()  # noqa: SIM905
UNNORMALISED = {"sum_favor": {"attention_norm": False}}  # the files' values are of sums, not of the divisor beside them
TOKENS = torch.tensor([[2, 5, 9, 4, 12, 7, 20, 6, 15, 10, 24, 8]])
PROMPT = torch.tensor([[5, 9]])
SOURCE = torch.tensor([[5, 9, 4, 12, 7, 2]])
STREAM = (
    "--task stateful_language_modeling --criterion fast_weight_cross_entropy --tokens-per-sample 8 --batch-size 4"
    " --arch fast_weight_lm --decoder-layers 2 --decoder-embed-dim 16 --decoder-input-dim 16 --decoder-output-dim 16"
    " --decoder-ffn-embed-dim 16 --decoder-attention-heads 2 --share-decoder-input-output-embed --no-token-positional-embeddings"
    " --update-rule delta --feature-map dpfp --seed 1 --optimizer adam --lr 0.01 --dropout 0 --no-epoch-checkpoints"
    " --log-format json --log-interval 1"
)
STOPPED = 25  # updates

pytestmark = pytest.mark.usefixtures("one_thread", "user_dir")


@pytest.fixture(scope="module")
def user_dir():
    utils.import_user_module(Namespace(user_dir=str(ROOT / "fw_fairseq")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return unpack(tmp_path_factory.mktemp("first_generation"))


@pytest.fixture(scope="module")
def numbers() -> dict[str, torch.Tensor]:
    return torch.load(FILES / "expected.pt", weights_only=True)


@pytest.fixture(scope="module")
def expected() -> dict:
    return json.loads((FILES / "expected.json").read_text())


def unpack(folder: Path) -> Path:
    shutil.unpack_archive(FILES / "files.tar.xz", folder)
    return folder


def load(path: Path, data: Path, **overrides):
    """The model in float64, and its task."""
    options = {"data": str(data)} | overrides
    [model], _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], arg_overrides=options)
    return model.eval().double(), task


@torch.no_grad()
def log_probabilities(model, *inputs) -> torch.Tensor:
    return model.get_normalized_probs(model(*inputs), log_probs=True)


def greedy(model, task, source: torch.Tensor) -> list[int]:
    generator = task.build_generator([model], Namespace(beam=1, max_len_a=0, max_len_b=12))
    sample = {"net_input": {"src_tokens": source, "src_lengths": torch.tensor([source.shape[1]])}}
    [[best]] = task.inference_step(generator, [model], sample)
    return best["tokens"].tolist()


def translate(model, source: torch.Tensor) -> torch.Tensor:
    return log_probabilities(model, source, torch.tensor([[source.shape[1]]]), source.roll(1))


def perplexity(folder: Path, task: str, *options) -> float:
    data = [folder / "data", "--gen-subset", "valid", "--path", folder / "delta_dpfp.pt"]
    printed = succeed(fairseq("eval_lm", *data, *USER_DIR, "--task", task, *options))
    return 2 ** float(re.search(r"Loss \(base 2\): ([\d.]+)", printed)[1])


def perplexities(folder: Path) -> dict[str, float]:
    """Of the whole text with its memory carried over, and of samples of 16 tokens, which start without one."""
    return {
        "streaming": perplexity(folder, "stateful_language_modeling", "--tokens-per-sample", 8),
        "ordinary": perplexity(folder, "language_modeling", "--tokens-per-sample", 16, "--batch-size", 4),
    }


def resume(folder: Path, saved: Path) -> tuple[dict, torch.Tensor]:
    """The log of the next update, and the model's answers after it."""
    options = [*STREAM.split(), "--restore-file", folder / "stopped.pt", "--max-update", STOPPED + 1, "--save-dir", saved]
    printed = succeed(fairseq("train", folder / "data", *USER_DIR, *options))
    [update] = updates(printed).values()
    model, _ = load(saved / "checkpoint_last.pt", folder / "data")
    return update, log_probabilities(model, TOKENS)


def score(folder: Path, sentence: str) -> torch.Tensor:
    hub = MODEL_REGISTRY["fast_weight_lm"].from_pretrained(str(folder), "delta_dpfp.pt", data_name_or_path=str(folder / "data"))
    return hub.eval().score(sentence)["positional_scores"]


def exported(folder: Path):
    sys.modules.setdefault("torchaudio", None)  # fairseq's, of another torch than ours: transformers would trip over it
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "exported", trust_remote_code=True).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder / "exported", trust_remote_code=True)


def write_on(model, tokenizer) -> str:
    tokens = model.generate(**tokenizer("the old", return_tensors="pt"), do_sample=False, max_new_tokens=10)
    return tokenizer.decode(tokens[0])


def assert_close(actual: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual.float(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_language_models(name, folder, numbers, expected):
    model, task = load(folder / f"{name}.pt", folder / "data", **UNNORMALISED.get(name, {}))
    assert_close(log_probabilities(model, TOKENS), numbers[name])
    assert greedy(model, task, PROMPT) == expected["greedy"][name]


def test_random_features_with_attention_norm(folder, numbers):
    model, _ = load(folder / "sum_favor.pt", folder / "data")
    answers = log_probabilities(model, TOKENS)
    assert answers.isfinite().all() and (answers - numbers["sum_favor"]).abs().max() > 1e-2, "the sums are divided"


def test_translation(folder, numbers, expected):
    model, task = load(folder / "translation.pt", folder / "pairs")
    assert_close(translate(model, SOURCE), numbers["translation"])
    assert greedy(model, task, SOURCE) == expected["greedy"]["translation"]


def test_perplexity(folder, expected):
    assert perplexities(folder) == pytest.approx(expected["perplexity"], rel=1e-4)


def test_resume_within_an_epoch(folder, numbers, expected, tmp_path):
    """With its memories and its optimizer: the next update has the loss that it had, and leaves the same model."""
    update, answers = resume(folder, tmp_path)
    assert int(update["num_updates"]) == STOPPED + 1
    assert {name: float(update[name]) for name in expected["next_update"]} == pytest.approx(expected["next_update"], rel=1e-3)
    assert_close(answers, numbers["resumed"], 1e-3)


def test_from_pretrained(folder, numbers):
    assert_close(score(folder, "the old cat sees a dog ."), numbers["score"])


def test_exported_folder(folder, numbers, expected):
    model, tokenizer = exported(folder)
    assert write_on(model, tokenizer) == expected["written_on"]
    with torch.no_grad():
        assert_close(model.double()(TOKENS).logits.log_softmax(-1), numbers["gated_delta_softmax"])
