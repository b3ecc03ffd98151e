"""fast_weight_lm through fairseq's own commands: train, resume, evaluate, generate, sweep, and what they refuse."""

from __future__ import annotations

import random
import re
import shutil
import sys

import pytest
import torch
from fairseq import checkpoint_utils
from support.commands import ROOT, USER_DIR, fairseq, install_sdist, run, succeed
from support.lm_data import SMALL, sentences
from support.runs import parameters, updates

import fw_fairseq.models  # noqa: F401
from fw_fairseq.models.fast_weight_lm import FastWeightLanguageModel

TASK = ["--task", "language_modeling"]
TRAIN = (
    f"{SMALL} --task language_modeling --tokens-per-sample 32 --batch-size 8 --optimizer adam --lr 0.01 --seed 1"
    " --log-format json --log-interval 1 --no-epoch-checkpoints"
)

pytestmark = pytest.mark.usefixtures("one_thread")
GENERATE = "--task language_modeling --sample-break-mode eos --gen-subset test --batch-size 16 --prefix-size 3 --max-len-b 16"


def train(data, folder, *args) -> str:
    return succeed(fairseq("train", data, *USER_DIR, *TRAIN.split(), "--save-dir", folder, *args))


def losses(log: str) -> dict[int, str]:
    """Training loss by update."""
    return {update: entry["loss"] for update, entry in updates(log).items()}


def evaluate(data, checkpoint, *args) -> tuple[int, float]:
    """Tokens and loss in bits."""
    printed = succeed(fairseq("eval_lm", data, *USER_DIR, *TASK, "--path", checkpoint, *args))
    count, loss = re.search(r"Evaluated ([\d,]+) tokens", printed)[1], re.search(r"Loss \(base 2\): ([\d.]+)", printed)[1]
    return int(count.replace(",", "")), float(loss)


def hypotheses(printed: str) -> dict[str, str]:
    return dict(line.split("\t")[0::2] for line in printed.splitlines() if line.startswith("H-"))


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*")}


@pytest.fixture(scope="session")
def trained(lm_data, tmp_path_factory):
    """A folder with checkpoints after 6 updates, and the log. Random features and dropout: all that a resume must bring back."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(lm_data, folder, "--feature-map", "favor", "--max-update", 6)


@pytest.fixture(scope="session")
def resumed(lm_data, tmp_path_factory):
    """The same with a stop after 3 updates, whose checkpoint is kept as third.pt."""
    folder = tmp_path_factory.mktemp("parts")
    train(lm_data, folder, "--feature-map", "favor", "--max-update", 3)
    shutil.copy(folder / "checkpoint_last.pt", folder / "third.pt")
    return folder, train(lm_data, folder, "--feature-map", "favor", "--max-update", 6)


@pytest.fixture(scope="session")
def both(trained, resumed, tmp_path_factory):
    """A folder with two checkpoints."""
    folder = tmp_path_factory.mktemp("both")
    shutil.copy(trained[0] / "checkpoint_last.pt", folder / "a.pt")
    shutil.copy(resumed[0] / "third.pt", folder / "b.pt")
    return folder


def load(folder, names, data):
    return FastWeightLanguageModel.from_pretrained(str(folder), names, data_name_or_path=str(data)).eval()


def test_training_learns_and_saves(trained):
    folder, log = trained
    assert sorted(contents(folder)) == ["checkpoint_best.pt", "checkpoint_last.pt"]
    assert sorted(losses(log)) == [1, 2, 3, 4, 5, 6]
    assert float(losses(log)[6]) < float(losses(log)[1]) - 1


def test_a_resumed_run_is_the_same_run(trained, resumed):
    (whole, whole_log), (parts, parts_log) = trained, resumed
    assert losses(parts_log) == {update: loss for update, loss in losses(whole_log).items() if update > 3}
    one, other = parameters(whole), parameters(parts)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "options",
    [
        "--adaptive-input --adaptive-input-cutoff 20,40 --adaptive-input-factor 2 --adaptive-softmax-cutoff 20,40"
        " --adaptive-softmax-factor 2 --tie-adaptive-weights --criterion adaptive_loss --ddp-backend legacy_ddp",
        "--share-decoder-input-output-embed --decoder-layerdrop 0.4 --decoder-learned-pos --feature-map dpfp --dpfp-nu 2",
        "--mixer-pattern softmax,fast_weight --update-rule gated_delta --feature-map rfa --feature-norm l2",
    ],
    ids=["adaptive", "tied-layerdrop", "hybrid"],
)
def test_fairseqs_options(options, lm_data, tmp_path):
    """Trains, and the loaded checkpoint gives what it generates the scores that it generated it with."""
    first, *_, last = losses(train(lm_data, tmp_path, *options.split(), "--max-update", 6)).values()
    assert float(last) < float(first)
    model = load(tmp_path, "checkpoint_last.pt", lm_data)
    prompts = [model.encode(text)[:-1] for text in ("the old cat", "the red")]
    for prompt, [best, *_] in zip(prompts, model.generate(prompts, beam=3, max_len_b=16)):
        assert best["tokens"][: len(prompt)].equal(prompt.to(best["tokens"]))
        [[scored]] = model.generate([best["tokens"].cpu()], score_reference=True)
        torch.testing.assert_close(scored["positional_scores"], best["positional_scores"][:-1], rtol=1e-4, atol=1e-4)


def test_evaluation_of_blocks_is_the_validation_of_training(lm_data, trained):
    folder, log = trained
    validation = re.search(r'"valid_loss": "([\d.]+)"', log)[1]
    _, loss = evaluate(
        lm_data, folder / "checkpoint_last.pt", "--gen-subset", "valid", "--tokens-per-sample", 32, "--context-window", 0
    )
    assert loss == pytest.approx(float(validation), abs=2e-3)


def test_evaluation_with_a_sliding_window(lm_data, trained):
    checkpoint = trained[0] / "checkpoint_last.pt"
    blocks = evaluate(lm_data, checkpoint, "--tokens-per-sample", 16)
    sliding = evaluate(lm_data, checkpoint, "--tokens-per-sample", 32, "--context-window", 16)
    assert sliding[0] == blocks[0] == sum(len(line.split()) + 1 for line in sentences(50, 2)), "every token once"
    assert 0 < abs(sliding[1] - blocks[1]) < 0.5
    window = ["--tokens-per-sample", 32, "--context-window", 16, "--batch-size", 1]
    assert evaluate(lm_data, checkpoint, *window, "--num-workers", 2) == sliding, "each process loads every other block"
    halves = [evaluate(lm_data, checkpoint, *window, "--num-shards", 2, "--shard-id", shard) for shard in (0, 1)]
    counts, sums = [count for count, _ in halves], [count * loss for count, loss in halves]
    assert sum(counts) == sliding[0] and sum(sums) / sum(counts) == pytest.approx(sliding[1], abs=2e-4)


def test_blocks_that_are_longer_than_the_positions_are_not_left_out(lm_data, trained):
    """The rest of the text alone would be scored."""
    options = ["--path", trained[0] / "checkpoint_last.pt", "--tokens-per-sample", 40, "--context-window", 30]
    done = fairseq("eval_lm", lm_data, *USER_DIR, *TASK, *options)
    said = "texts of 40 tokens are longer than the model's 32 positions; give a shorter --tokens-per-sample"
    assert done.returncode == 1 and done.stderr.splitlines()[-1].endswith(said)


def generate(data, paths, *options) -> dict[int, str]:
    """What follows the first three words of each test sentence."""
    path = ":".join(map(str, paths))
    found = hypotheses(succeed(fairseq("generate", data, *USER_DIR, *GENERATE.split(), "--path", path, *options)))
    texts, prompts = {int(name[2:]): text for name, text in found.items()}, list(sentences(50, 2))
    assert len(texts) > 40
    assert all(text.split()[:3] == prompts[i].split()[:3] for i, text in texts.items())
    return texts


def test_generation_with_a_beam_and_an_ensemble(lm_data, both):
    texts = generate(lm_data, [both / "a.pt", both / "b.pt"], "--beam", 3)
    model = load(both, "a.pt:b.pt", lm_data)
    for i in sorted(texts)[:3]:
        prompt = model.encode(" ".join(texts[i].split()[:3]))[:-1]
        assert model.decode(model.generate(prompt, beam=3, max_len_b=16)[0]["tokens"]) == texts[i]


def test_an_ensemble_averages_probabilities(lm_data, both):
    scores = (load(both, names, lm_data).score("the old cat sees a dog .") for names in ("a.pt", "b.pt", "a.pt:b.pt"))
    a, b, averaged = (score["positional_scores"].exp() for score in scores)
    assert len(averaged) == 7
    torch.testing.assert_close(averaged, (a + b) / 2)


@pytest.mark.long
def test_evaluation_of_an_ensemble(lm_data, both):
    """Between the average of the losses and the better one's, as averaged probabilities are."""
    a, b, ensemble = (
        evaluate(lm_data, paths, "--tokens-per-sample", 32)[1]
        for paths in (both / "a.pt", both / "b.pt", f"{both / 'a.pt'}:{both / 'b.pt'}")
    )
    assert a < b
    assert min(a, b) - 0.1 < ensemble < (a + b) / 2


def test_a_prompt_may_repeat_what_its_answer_may_not(lm_data, trained):
    options = [*USER_DIR, *TASK, "--path", trained[0] / "checkpoint_last.pt", "--beam", 3, "--max-len-b", 14]
    prompt, size = "the old cat the old dog the old", 2
    done = fairseq("interactive", lm_data, *options, "--no-repeat-ngram-size", size, input=f"{prompt}\n")
    written = hypotheses(succeed(done))["H-0"].split()
    count = len(prompt.split())
    assert written[:count] == prompt.split() and len(written) > count
    ngrams = [tuple(written[i : i + size]) for i in range(len(written) - size + 1)]
    assert all(ngrams[i] not in ngrams[:i] for i in range(count - size + 1, len(ngrams)))


@pytest.mark.long
def test_sixty_four_prompts_at_once_are_answered_as_one_by_one(lm_data, trained):
    """In Python and by fairseq-interactive, prompts of 1 to 8 words mixed."""
    draw, model = random.Random(3), load(trained[0], "checkpoint_last.pt", lm_data)
    texts = [" ".join(text.split()[: draw.randint(1, 8)]) for text in sentences(64, 5)]
    prompts = [model.encode(text)[:-1] for text in texts]
    together = [best["tokens"] for best, *_ in model.generate(prompts, beam=2, max_len_b=16)]
    for prompt, tokens in zip(prompts, together):
        assert tokens.equal(model.generate([prompt], beam=2, max_len_b=16)[0][0]["tokens"])
    options = [*USER_DIR, *TASK, "--path", trained[0] / "checkpoint_last.pt", "--beam", 2, "--max-len-b", 16]
    told = ["--buffer-size", 64, "--batch-size", 64]
    done = fairseq("interactive", lm_data, *options, *told, input="".join(f"{text}\n" for text in texts))
    printed = hypotheses(succeed(done))
    assert [printed[f"H-{i}"] for i in range(64)] == [model.decode(tokens) for tokens in together]


@pytest.mark.long
def test_from_pretrained(lm_data, trained):
    """In a script of its own that imports nothing else first."""
    code = (
        "import sys; from fw_fairseq.models import FastWeightLanguageModel\n"
        "model = FastWeightLanguageModel.from_pretrained(sys.argv[1], 'checkpoint_last.pt', data_name_or_path=sys.argv[2]).eval()\n"
        "print(*model.sample(['the old cat', 'a dog'], beam=1, sampling=True, max_len_b=12), sep='\\n')\n"
        "print(*(float(model.score(text)['score']) for text in ('the old cat sees a dog .', 'sees . dog the a cat old')))"
    )
    done = run(sys.executable, "-c", code, trained[0], lm_data)
    assert done.returncode == 0, done.stderr[-3000:]
    one, other, scores = done.stdout.splitlines()[-3:]
    assert one.startswith("the old cat") and other.startswith("a dog")
    ordered, shuffled = map(float, scores.split())
    assert ordered > shuffled


def hydra(data, *args):
    config = ["--config-dir", ROOT / "recipes" / "hydra", "--config-name", "fast_weight_lm"]
    sweep, overrides = [x for x in args if x.startswith("--")], [x for x in args if not x.startswith("--")]
    small = [
        "task.tokens_per_sample=32",
        "model.decoder_layers=2",
        "lr_scheduler.warmup_updates=0",
        "common.log_interval=1",
    ]
    given = [f"common.user_dir={ROOT / 'fw_fairseq'}", f"task.data={data}", *small]
    return fairseq("hydra_train", *config, *sweep, *given, *overrides, cwd=data.parent)


def test_hydra_recipe(lm_data, tmp_path):
    done = hydra(lm_data, "optimization.max_update=3", f"hydra.run.dir={tmp_path}", f"checkpoint.save_dir={tmp_path / 'saved'}")
    log = succeed(done)
    first, *_, last = losses(log).values()
    assert float(last) < float(first)
    config = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "saved" / "checkpoint_last.pt"))["cfg"]
    assert (config["model"]["_name"], config["model"]["update_rule"], config["model"]["dpfp_nu"]) == ("fast_weight_lm", "delta", 1)


@pytest.mark.long
def test_hydra_sweep(lm_data, tmp_path):
    succeed(hydra(lm_data, "--multirun", "optimization.max_update=2", "model.update_rule=sum,delta", f"hydra.sweep.dir={tmp_path}"))
    shapes = [parameters(tmp_path / job / "checkpoints")["decoder.layers.0.self_attn.mixer.in_proj.weight"].shape for job in "01"]
    assert shapes == [(3 * 128, 128), (3 * 128 + 8, 128)], "delta has one more output a head"


@pytest.mark.parametrize(
    "given, said",
    [
        (["model.update_rule=decay", "model.attention_norm=true"], "--attention-norm is not defined for --update-rule decay"),
        (["model.update_rule=deltaa"], "Invalid value 'deltaa', expected one of [sum, "),
    ],
    ids=["combination", "choice"],
)
def test_hydra_shows_a_mistake_as_a_sentence(given, said, lm_data, tmp_path):
    done = hydra(lm_data, *given, f"hydra.run.dir={tmp_path}")
    assert done.returncode != 0 and f"hydra_train: {said}" in done.stderr
    assert "Traceback" not in done.stderr and "HYDRA_FULL_ERROR=1" in done.stderr


def test_refused_options(lm_data, trained):
    """In a folder with checkpoints, which stay as they are."""
    folder, _ = trained
    options = "--update-rule decay --attention-norm --feature-map identity --feature-norm none"
    message = "train: --attention-norm is not defined for --update-rule decay; leave it out, or use one of: sum, gated, delta"
    before = contents(folder)
    done = fairseq("train", lm_data, *USER_DIR, *TRAIN.split(), "--save-dir", folder, "--max-update", 9, *options.split())
    assert done.returncode != 0
    assert message in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr
    assert contents(folder) == before


def test_missing_dictionary(tmp_path):
    done = fairseq("train", tmp_path / "nowhere", *USER_DIR, *TRAIN.split(), "--save-dir", tmp_path / "saved", "--max-update", 1)
    assert done.returncode != 0
    assert "No such file or directory" in done.stderr.splitlines()[-1] and "nowhere/dict.txt" in done.stderr.splitlines()[-1]
    assert contents(tmp_path / "saved") == {}


def test_truncated_checkpoint(lm_data, trained, tmp_path):
    whole = (trained[0] / "checkpoint_last.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(whole[: len(whole) // 2])
    done = fairseq("eval_lm", lm_data, *USER_DIR, *TASK, "--path", tmp_path / "half.pt")
    assert done.returncode != 0
    assert f"eval_lm: {tmp_path / 'half.pt'} cannot be read as a fairseq checkpoint (" in done.stderr.splitlines()[-1]


@pytest.mark.long
def test_an_override_is_an_option_of_the_model(lm_data, trained, tmp_path):
    """A name that the checkpoint lacks, as one of an older version does, is set if the model has such an option today."""
    path = trained[0] / "checkpoint_last.pt"
    for command in (["eval_lm"], ["validate", "--batch-size", 8]):
        done = fairseq(
            command[0], lm_data, *USER_DIR, *TASK, *command[1:], "--path", path, "--model-overrides", "{'xl_segmnet': 3}"
        )
        assert done.returncode != 0
        said = f"{command[0]}: --model-overrides names 'xl_segmnet', which is no option of {path}; is it xl_segment?"
        assert done.stderr.splitlines()[-1].endswith(said)
    state = torch.load(path, weights_only=False)
    del state["cfg"]["model"]["attention_norm"]
    torch.save(state, tmp_path / "older.pt")
    given = [tmp_path / "older.pt", "--tokens-per-sample", 32, "--model-overrides"]
    before = evaluate(lm_data, *given, "{'data': 'elsewhere'}")
    assert before == evaluate(lm_data, path, "--tokens-per-sample", 32) != evaluate(lm_data, *given, "{'attention_norm': True}")


@pytest.mark.long
def test_a_checkpoint_that_scales_reads_after_the_norm(lm_data, tmp_path):
    """As all did before there was an option: it computes what it did, and is resumed with the option alone."""
    options = ["--update-rule", "gated_delta", "--feature-norm", "l2", "--scale-reads", "--output-norm", "--max-update"]
    train(lm_data, tmp_path, *options, 3, "--scale-after-norm")
    path = tmp_path / "checkpoint_last.pt"
    given = [lm_data, path, "--tokens-per-sample", 32, "--model-overrides"]
    before = evaluate(*given, "{}")
    state = torch.load(path, weights_only=False)
    del state["cfg"]["model"]["scale_after_norm"]
    torch.save(state, path)
    assert before == evaluate(*given, "{}") != evaluate(*given, "{'scale_after_norm': False}")
    done = fairseq("train", lm_data, *USER_DIR, *TRAIN.split(), "--save-dir", tmp_path, *options, 4)
    said = f"{path} was made with --scale-after-norm, and this model has --no-scale-after-norm; give the checkpoint's options"
    assert done.returncode == 1 and said in done.stderr.splitlines()[-1]
    assert [*losses(train(lm_data, tmp_path, *options, 4, "--scale-after-norm"))] == [4]


def test_another_dictionary_of_the_same_size_is_refused(lm_data, trained, tmp_path):
    shutil.copytree(lm_data, tmp_path / "data")
    lines = (lm_data / "dict.txt").read_text().splitlines(keepends=True)
    path = trained[0] / "checkpoint_last.pt"
    said = f"the source dictionary of the data has other words, or another order, than that of {path}; give the data that its"
    validate = ["validate", *TASK, "--valid-subset", "test", "--batch-size", 8]
    for changed, command in ((lines[::-1], ["eval_lm", *TASK]), (lines[1:], validate)):
        (tmp_path / "data" / "dict.txt").write_text("".join(changed))
        done = fairseq(command[0], tmp_path / "data", *USER_DIR, *command[1:], "--path", path)
        assert done.returncode != 0 and said in done.stderr.splitlines()[-1], done.stderr[-900:]
        with pytest.raises(ValueError, match=r"^the source dictionary of the data has other words"):
            load(trained[0], "checkpoint_last.pt", tmp_path / "data")


@pytest.mark.long
def test_training_from_the_installed_package(lm_data, tmp_path):
    """Not from the checkout: its editable install is taken out of the interpreter, and the place of the import is checked."""
    site = install_sdist(tmp_path)
    code = (
        "import sys; sys.path = [p for p in sys.path if p]; sys.meta_path = [f for f in sys.meta_path"
        " if '__editable__' not in getattr(f, '__module__', '') + getattr(f, '__name__', '')];"
        "from fairseq_cli.train import cli_main; cli_main(); print('imported', sys.modules['fw_fairseq'].__file__)"
    )
    options = ["--user-dir", site / "fw_fairseq", *USER_DIR[2:], *TRAIN.split(), "--save-dir", "saved", "--max-update", 2]
    printed = succeed(run(sys.executable, "-c", code, lm_data, *options, cwd=tmp_path))
    assert f"imported {site / 'fw_fairseq' / '__init__.py'}" in printed
    assert sorted(losses(printed)) == [1, 2]
    assert sorted(contents(tmp_path / "saved")) == ["checkpoint_best.pt", "checkpoint_last.pt"]


@pytest.mark.parametrize(
    "options, sentence",
    [
        ("--batch-size 8 --adaptive-softmax-cutoff 20,4000", "--adaptive-softmax-cutoff is 20,4000, and the dictionary has"),
        ("--max-update 1", "Must specify batch size either with --max-tokens or --batch-size"),
    ],
    ids=["cutoff", "batch"],
)
def test_what_cannot_be_trained_is_a_sentence(options, sentence, lm_data, tmp_path):
    given = [*SMALL.split(), *options.split(), "--save-dir", tmp_path]
    done = fairseq("train", lm_data, *USER_DIR, "--task", "language_modeling", "--tokens-per-sample", 16, *given)
    assert done.returncode == 1 and f"fairseq_cli.train: {sentence}" in done.stderr.splitlines()[-1]
