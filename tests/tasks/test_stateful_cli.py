"""stateful_language_modeling and fast_weight_cross_entropy through fairseq's commands."""

from __future__ import annotations

import gc
import multiprocessing
import re
import sys
from argparse import Namespace
from unittest import mock

import pytest
import torch
from fairseq.data import Dictionary
from support.commands import USER_DIR, Command, fairseq, run_here, succeed, train_two_workers
from support.runs import losses, parameters, updates
from support.streams import evaluate, train, training

import fw_fairseq.models  # noqa: F401
from fw_fairseq.generation.memory import Memory
from fw_fairseq.mixers import FastWeight
from fw_fairseq.models.fast_weight_decoder import FastWeightDecoder
from fw_fairseq.models.fast_weight_lm import FastWeightLanguageModel, FastWeightLanguageModelConfig
from fw_fairseq.tasks.stateful_language_modeling import PromptedGenerator

RETRIEVAL = (
    "--task associative_retrieval --arch retrieval --criterion retrieval_mse --symbols 4 --batch-size 4 --optimizer adam"
    " --max-update 6 --no-epoch-checkpoints"
)

SHARED = {  # with --sequence-parallel
    "decay": "--checkpoint-activations --batch-size 4 --tokens-per-sample 146",  # of the last segment the second worker has nothing
    "delta": "--attention-norm --reset-at-eos",
    "gated_delta": "--state-norm-penalty 0.1 --decoder-learned-pos --positions --ddp-backend pytorch_ddp",
}

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def trained(stream_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder / "checkpoint_last.pt", train(stream_data, folder)


def assert_resumed(whole, parts, first, second):
    """A run of 6 updates in ``whole``, and one of 3 that went on to 6 in ``parts``, with their logs."""
    assert losses(second) == {update: loss for update, loss in losses(first).items() if update > 3}
    one, other = parameters(whole), parameters(parts)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_resume_goes_on_with_the_streams_memory(stream_data, tmp_path):
    """However many processes load segments ahead; with random features too: those that the memory was written with."""
    options = "--num-workers 2 --feature-map favor --update-rule sum --attention-norm --feature-norm none"
    first = train(stream_data, tmp_path / "whole", *options.split())
    train(stream_data, tmp_path / "parts", *options.split(), "--max-update", 3)
    assert_resumed(tmp_path / "whole", tmp_path / "parts", first, train(stream_data, tmp_path / "parts", *options.split()))
    saved = torch.load(tmp_path / "whole" / "checkpoint_last.pt", weights_only=True)["extra_state"]["train_iterator"]
    assert [sorted(memories) for memories in saved["carried"]] == [[0, 1]] and saved["iterations_in_epoch"] == 6


def run_counting(command, folder, files) -> None:
    """Prints how many processes there are after each validation. Nothing waits for the search for circles of references."""
    gc.disable()
    from fairseq_cli import train as fairseq_train

    validate = fairseq_train.validate

    def counting(*args):
        losses = validate(*args)
        print("processes:", len(multiprocessing.active_children()), file=sys.stderr)
        return losses

    with mock.patch.object(fairseq_train, "validate", counting):
        run_here(command, folder, files)


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("task, options", [("streams", "--num-workers 2 --max-valid-steps 1"), ("retrieval", "")])
def test_no_validation_leaves_processes_behind(task, options, stream_data, tmp_path):
    """Read to its end or not, in the middle of an epoch or at its end."""
    if task == "streams":
        command = [*training(stream_data, tmp_path), "--validate-interval-updates", 1]
    else:
        command = [*RETRIEVAL.split(), "--updates-per-epoch", 1, "--save-dir", tmp_path]
    log = succeed(Command("train", *command, *options.split(), *USER_DIR, target=run_counting).wait())
    counts = [int(count) for count in re.findall(r"processes: (\d+)", log)]
    assert len(counts) == 6 and max(counts) == counts[0]


@pytest.mark.long
def test_two_workers_read_the_streams_of_one(stream_data, tmp_path):
    """2 workers with 4 streams are 1 worker with 8, and each resumes with its own memory."""
    options = ["--dropout", 0, "--clip-norm", 1]
    one = train(stream_data, tmp_path / "one", *options, "--batch-size", 8)
    two = updates(train_two_workers(*training(stream_data, tmp_path / "two", *options)))
    for update in one:
        assert float(two[update]["loss"]) == pytest.approx(float(one[update]["loss"]), abs=2e-3)
        assert float(two[update]["fw_1_state_norm"]) == pytest.approx(float(one[update]["fw_1_state_norm"]), rel=1e-3)
    train_two_workers(*training(stream_data, tmp_path / "parts", *options, "--max-update", 3))
    assert_resumed(
        tmp_path / "two", tmp_path / "parts", two, updates(train_two_workers(*training(stream_data, tmp_path / "parts", *options)))
    )


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("rule", SHARED)
def test_two_workers_share_each_stream(rule, stream_data, tmp_path):
    """Each takes its half of every segment, and together they are one worker: loss, gradients, parameters and memories, over the
    segments of two epochs; and one worker goes on where two stopped."""
    options = (
        "--batch-size 3 --tokens-per-sample 48 --max-epoch 2 --max-update 99 --dropout 0 --clip-norm 1 --optimizer sgd --lr 0.5"
    )
    options = f"{options} --update-rule {rule} {SHARED[rule]}".split()
    positions = "--positions" in options
    options = [x for x in options if x != "--positions"]
    one, two = (training(stream_data, tmp_path / name, *options, positions=positions) for name in ("one", "two"))
    first = updates(succeed(fairseq("train", *one, *USER_DIR)))
    stop = 7 if rule == "delta" else 99
    second = updates(train_two_workers(*two, "--sequence-parallel", 2, "--max-update", stop))
    if rule == "delta":
        second |= updates(succeed(fairseq("train", *two, *USER_DIR)))
    assert first.keys() == second.keys() and len(first) >= 4
    for update, logs in first.items():
        for key in ("loss", "gnorm", "fw_0_state_norm", "fw_1_state_norm"):
            assert float(second[update][key]) == pytest.approx(float(logs[key]), abs=2e-3, rel=1e-3), (update, key)
    one, two = (parameters(tmp_path / name) for name in ("one", "two"))
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=0, atol=1e-5)


def test_gates_and_state_norms_are_logged(trained):
    _, logs = trained
    for layer in (0, 1):
        assert 0 < float(logs[6][f"fw_{layer}_gate_beta"]) < 1
        assert float(logs[6][f"fw_{layer}_write_strength"]) == float(logs[6][f"fw_{layer}_gate_beta"])
        assert float(logs[6][f"fw_{layer}_state_norm"]) > 0


@pytest.mark.parametrize("extra", [[], ["--reset-at-eos"]])
def test_streaming_perplexity_does_not_depend_on_the_segment(stream_data, trained, extra):
    options = ["--task", "stateful_language_modeling", "--batch-size", 1, *extra]
    results = [evaluate(stream_data, trained[0], *options, "--tokens-per-sample", t) for t in (5, 64)]
    assert results[0] == results[1]
    if not extra:
        recomputed = evaluate(stream_data, trained[0], "--task", "language_modeling", "--tokens-per-sample", 1000)
        assert recomputed == results[0]  # the whole text as one sample


def test_sliding_windows_score_as_fairseqs_do(stream_data, trained):
    options = ["--tokens-per-sample", 16, "--context-window", 13]
    one_by_one = evaluate(stream_data, trained[0], "--task", "language_modeling", *options)
    at_once = evaluate(stream_data, trained[0], "--task", "sliding_language_modeling", *options, "--batch-size", 7)
    assert at_once[0] == one_by_one[0]
    assert abs(at_once[1] - one_by_one[1]) < 2e-4


def test_a_prompt_in_one_pass_goes_on_as_a_prompt_in_steps(stream_data, trained):
    """Prompts of unequal length, beam search; the generator that reads prompts at once against fairseq's own."""
    prompts = "word1 word2 word3 word4\nword5 word6\n"

    def continue_(task):
        options = f"--path {trained[0]} --task {task} --beam 3 --max-len-b 9 --buffer-size 2 --batch-size 2".split()
        done = fairseq("interactive", stream_data, *USER_DIR, *options, input=prompts)
        succeed(done)
        return [line for line in done.stdout.splitlines() if line[:2] in ("H-", "P-")]

    lines, expected = continue_("stateful_language_modeling"), continue_("language_modeling")
    for line, other in zip(lines, expected, strict=True):
        words, others = ([x for x in re.split(r"\s", text) if not re.fullmatch(r"-[\d.]+", x)] for text in (line, other))
        scores, wanted = ([float(x) for x in re.findall(r"(?<=\s)-[\d.]+", text)] for text in (line, other))
        assert words == others and scores == pytest.approx(wanted, abs=2e-4)
    assert "word1 word2 word3 word4 " in lines[0] and "word5 word6 " in lines[2]


def test_a_prompt_is_read_once(monkeypatch):
    """Two beams of a prompt of 30 tokens and 5 new ones: one pass over the prompt, then one token a step."""
    dictionary = Dictionary()
    for i in range(20):
        dictionary.add_symbol(f"word{i}")
    args = Namespace(**{n: f.default for n, f in FastWeightLanguageModelConfig.__dataclass_fields__.items()})
    args.no_token_positional_embeddings, args.max_target_positions, args.tokens_per_sample = True, 64, 64
    args.decoder_layers_to_keep, args.decoder_layers = None, 1
    embedding = torch.nn.Embedding(len(dictionary), args.decoder_embed_dim, dictionary.pad())
    model = FastWeightLanguageModel(FastWeightDecoder(args, dictionary, embedding, no_encoder_attn=True)).eval()
    lengths, forward, step = [], FastWeight.forward, Memory.of_projected
    monkeypatch.setattr(
        FastWeight, "forward", lambda self, x, *rest, **named: lengths.append(len(x)) or forward(self, x, *rest, **named)
    )
    monkeypatch.setattr(Memory, "of_projected", lambda self, x: lengths.append(1) or step(self, x))
    generator = PromptedGenerator([model], dictionary, beam_size=2, max_len_a=0, max_len_b=36)
    prompt = torch.randint(4, 24, (1, 30))
    generator.generate([model], {"net_input": {"src_tokens": prompt, "src_lengths": torch.tensor([30])}}, prefix_tokens=prompt)
    assert lengths[0] == 31 and set(lengths[1:]) == {1} and len(lengths) <= 8


def test_penalty_and_accumulation_and_adaptive_softmax(stream_data, tmp_path):
    free = train(stream_data, tmp_path / "free", "--update-freq", 2, "--max-update", 3)
    held = train(stream_data, tmp_path / "held", "--update-freq", 2, "--max-update", 3, "--state-norm-penalty", 10)
    assert float(held[3]["fw_1_state_norm"]) < float(free[3]["fw_1_state_norm"])
    cutoffs = ["--adaptive-input-cutoff", "10,20", "--adaptive-softmax-cutoff", "10,20"]
    logs = train(stream_data, tmp_path / "adaptive", "--adaptive-input", *cutoffs, "--tie-adaptive-weights", "--max-update", 2)
    assert "fw_0_state_norm" in logs[2]


def test_mistakes(stream_data, trained, tmp_path):
    task = ["--task", "stateful_language_modeling"]
    windowed = [*task, "--path", trained[0], "--tokens-per-sample", 32, "--context-window", 16]
    done = fairseq("eval_lm", stream_data, *USER_DIR, *windowed)
    assert done.returncode and "--context-window computes the context again" in done.stderr.splitlines()[-1]
    done = fairseq("train", *training(stream_data, tmp_path, "--state-norm-penalty", 1, "--checkpoint-activations"), *USER_DIR)
    assert done.returncode and "does not work with --checkpoint-activations" in done.stderr.splitlines()[-1]
    shared = ["--sequence-parallel", 2, "--mixer-pattern", "fast_weight,sru"]
    done = fairseq("train", *training(stream_data, tmp_path, *shared), *USER_DIR)
    assert done.returncode and "the memory of Sru does not pass from worker to worker" in done.stderr.splitlines()[-1]
    assert not list(tmp_path.glob("checkpoint*.pt"))
