"""fast_weight_transformer and recipes/wmt14 through the shell and fairseq's own commands."""

from __future__ import annotations

import os
import re
import shutil

import pytest
from support import parallel_text, programs
from support.commands import ROOT, USER_DIR, fairseq, run, succeed
from support.runs import updates

import fw_fairseq.models  # noqa: F401
from fw_fairseq.tools.checkpoints import load_language_model
from fw_fairseq.tools.convert.conversion import convert

SIZES = "--encoder-layers 2 --decoder-layers 2 --encoder-attention-heads 4 --decoder-attention-heads 4"
WIDTHS = "--encoder-embed-dim 32 --decoder-embed-dim 32 --encoder-ffn-embed-dim 64 --decoder-ffn-embed-dim 64 --dropout 0"
TRAIN = (
    f"{SIZES} {WIDTHS} --cpu --max-tokens 400 --update-freq 1 --lr 0.01 --warmup-updates 10 --clip-norm 1"
    " --log-format json --log-interval 1"
)
GENERATE = [*USER_DIR, "--gen-subset", "test", "--batch-size", 16, "--remove-bpe"]


def recipe(name, *args, **variables):
    given = [f"{key}={value}" for key, value in {"BIN": programs.folder(), "WORKERS": 1, "CPU": 1, **variables}.items()]
    return run("env", *given, ROOT / "recipes" / "wmt14" / f"{name}.sh", *args)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wmt14")
    (folder / "data").mkdir()
    parallel_text.write(folder / "data", train=300, dev=20, test=30)
    succeed(recipe("prepare", DATA=folder / "data", OUT=folder / "out", VALID="dev", BPE=60))
    return folder


@pytest.fixture(scope="session")
def trained(prepared):
    """OUT of the recipe with one trained model, and what training it printed."""
    out = prepared / "out"
    return out, succeed(recipe("train", "dpfp2", *TRAIN.split(), "--max-epoch", 4, OUT=out))


@pytest.fixture(scope="session")
def both(trained):
    """Two checkpoints of one model."""
    out, _ = trained
    shutil.copy(out / "runs/dpfp2/checkpoint_best.pt", out / "a.pt")
    succeed(recipe("train", "dpfp2", *TRAIN.split(), "--max-epoch", 5, OUT=out))
    return [out / "a.pt", out / "runs/dpfp2/checkpoint_last.pt"]


def generate(out, paths, *options):
    path = ":".join(map(str, paths))
    return fairseq("generate", out / "bin", *GENERATE, "--path", path, *options)


def lines(printed: str, kind: str) -> dict[int, str]:
    """The text of each sentence, by its number."""
    found = (line[2:].split("\t") for line in printed.splitlines() if line.startswith(f"{kind}-"))
    return {int(number): parts[-1] for number, *parts in found}


def last_line(done) -> str:
    assert done.returncode != 0
    return done.stderr.splitlines()[-1]


def test_prepared_text(prepared):
    out = prepared / "out"
    splits = {split: len((out / "bpe" / f"{split}.en").read_text().splitlines()) for split in ("train", "valid", "test")}
    assert splits == {"train": 300, "valid": 20, "test": 30}
    assert (out / "bin" / "dict.en.txt").read_text() == (out / "bin" / "dict.de.txt").read_text(), "joined"
    tokens = (out / "tok" / "train.en").read_text()
    assert " @-@ in @-@ law" in tokens and "-in-" not in tokens and " .\n" in tokens
    assert "@@ " in (out / "bpe" / "train.de").read_text()


def test_preparing_again_goes_on_where_files_are_missing(prepared):
    out = prepared / "out"
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if path.is_file() and "runs" not in path.parts}
    missing = out / "bpe" / "test.de"
    text = missing.read_text()
    missing.unlink()
    printed = succeed(recipe("prepare", DATA=prepared / "data", OUT=out, VALID="dev", BPE=60))
    assert printed.splitlines() == [f"{out}/raw is there and was made with these options", str(missing), f"{out}/bin is there"]
    assert missing.read_text() == text
    assert all(path.stat().st_mtime_ns == time for path, time in before.items() if path != missing)


def test_preparing_with_other_options_is_refused(prepared):
    out = prepared / "out"
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*") if "runs" not in path.parts}
    for changed in ({"BPE": 61}, {"DATA": out / "raw"}):
        message = last_line(recipe("prepare", **{"DATA": prepared / "data", "OUT": out, "VALID": "dev", "BPE": 60} | changed))
        assert message.startswith(f"prepare.sh: {out}/raw was made with SOURCE=en TARGET=de DATA={prepared / 'data'} ")
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*") if "runs" not in path.parts}


def test_recipe_trains_and_learns(trained):
    out, printed = trained
    losses = [float(loss) for loss in re.findall(r'"train_loss": "([\d.]+)"', printed)]
    assert len(losses) == 4 and losses[-1] < losses[0] - 1
    assert '"valid_best_bleu"' in printed
    assert (out / "runs/dpfp2/checkpoint_best.pt").exists()


def test_recipe_evaluates(trained):
    out, _ = trained
    row = succeed(recipe("eval", "dpfp2", OUT=out)).splitlines()[0]
    name, detokenised, split, speed = row.strip("| ").split(" | ")
    assert name == "dpfp2" and 0 <= float(detokenised) <= 100 and 0 <= float(split) <= 100 and float(speed) > 0
    text = (out / "runs/dpfp2/test.de").read_text().splitlines()
    assert len(text) == 30 and not any("@-@" in line or " ." in line for line in text)


@pytest.mark.parametrize(
    "name, args, variables, message",
    [
        ("train", [], {}, "train.sh: ROW is missing; it must be softmax, linear, performerM, prescaledM or dpfpNU"),
        ("train", ["linear-crss"], {}, "ROW is linear-crss; after the - must be encoder, decoder or cross"),
        (
            "train",
            ["linear"],
            {"OUT": "nowhere"},
            "train.sh: nowhere/bin is missing; run recipes/wmt14/prepare.sh with the same OUT and TOY first",
        ),
        (
            "eval",
            ["dpfp2"],
            {"OUT": "nowhere"},
            "eval.sh: nowhere/runs/dpfp2/checkpoint_best.pt is missing; run recipes/wmt14/train.sh dpfp2 with the same OUT",
        ),
        ("prepare", [], {"DATA": "nowhere"}, "nowhere/train.en is missing; DATA must have {train,valid,test}.{en,de}"),
        ("prepare", [], {"SOURCE": "fr"}, "prepare.sh: only en-de is downloaded; for fr-de set DATA to a folder with its text"),
    ],
)
def test_recipe_mistakes(name, args, variables, message, tmp_path):
    assert message in last_line(recipe(name, *args, **{"OUT": tmp_path, **variables}))


def test_unequal_lines_are_refused(tmp_path):
    parallel_text.write(tmp_path, train=9, valid=3, test=3)
    (tmp_path / "valid.de").write_text("Ein Satz.\n")
    message = last_line(recipe("prepare", DATA=tmp_path, OUT=tmp_path / "out"))
    assert "valid.en and valid.de differ in their number of lines" in message


@pytest.mark.long
def test_generation_does_not_depend_on_the_batch(both):
    out = both[0].parent
    printed = succeed(generate(out, both[:1], "--beam", 4))
    texts = lines(printed, "H")
    assert sorted(texts) == list(range(30))
    assert texts == lines(succeed(generate(out, both[:1], "--beam", 4, "--batch-size", 1)), "H")
    assert re.search(r"^Generate test with beam=4: BLEU4? = [\d.]+", printed, re.MULTILINE)


@pytest.mark.parametrize(
    "options",
    [
        "--beam 4 --diverse-beam-groups 2 --diverse-beam-strength 0.5",
        "--beam 4 --retain-iter-history --no-repeat-ngram-size 2 --lenpen 0.6 --unkpen 1 --scoring sacrebleu",
    ],
    ids=["diverse", "history-lengths"],
)
def test_generation_options(options, both):
    printed = succeed(generate(both[0].parent, both[:1], *options.split()))
    texts = lines(printed, "H")
    assert sorted(texts) == list(range(30))
    if "--no-repeat-ngram-size 2" in options:
        pieces = [text.split("\t")[-1].split() for text in lines(printed, "D").values()]
        assert max(map(len, pieces)) > 4 and all(len({*zip(x, x[1:])}) == max(len(x) - 1, 0) for x in pieces)
    assert re.search(r"^Generate test with beam=\d: BLEU", printed, re.MULTILINE)


def test_prefixes_and_ensembles(both):
    """Two models at once, each hypothesis going on from the first three tokens of its reference."""
    out = both[0].parent
    printed = succeed(generate(out, both, "--beam", 3, "--prefix-size", 3, "--post-process", "none"))
    hypotheses, references = lines(printed, "H"), lines(printed, "T")
    assert len(hypotheses) == 30
    assert all(hypotheses[i].split()[:3] == references[i].split()[:3] for i in references)


def test_references_are_scored_as_the_beam_scored_them(both):
    """Translations of beam search as references: the full pass gives them the scores of decoding step by step."""
    out = both[0].parent
    found = succeed(generate(out, both[:1], "--beam", 2, "--post-process", "none"))
    hypotheses = lines(found, "H")
    folder = out / "scored"
    folder.mkdir()
    for name, texts in (("test.de", hypotheses), ("test.en", lines(found, "S"))):
        (folder / name).write_text("".join(texts[i] + "\n" for i in sorted(texts)))
    dictionaries = ["--srcdict", out / "bin/dict.en.txt", "--tgtdict", out / "bin/dict.de.txt"]
    succeed(
        fairseq("preprocess", "-s", "en", "-t", "de", *dictionaries, "--testpref", folder / "test", "--destdir", folder / "bin")
    )
    scored = succeed(
        fairseq("generate", folder / "bin", *GENERATE, "--path", both[0], "--score-reference", "--post-process", "none")
    )
    assert lines(scored, "H") == hypotheses
    for number, scores in lines(found, "P").items():
        again = lines(scored, "P")[number]
        assert [float(x) for x in again.split()] == pytest.approx([float(x) for x in scores.split()], abs=1e-3)


def test_interactive_takes_empty_lines_and_names_long_ones(both):
    out = both[0].parent
    options = [out / "bin", *USER_DIR, "--path", both[0], "--beam", 3, "--buffer-size", 4, "--batch-size", 4, "--max-len-b", 9]
    printed = succeed(fairseq("interactive", *options, input="the old c@@ at\n\nthe\n"))
    assert sorted(lines(printed, "H")) == [0, 1, 2]
    done = fairseq("interactive", *options, input="the " * 1100 + "\n")
    assert re.search(r"Size of sample #0 is invalid .*1101.* since max_positions=\(1024, 1024\)", last_line(done))


def test_alignments_are_refused(both):
    message = last_line(generate(both[0].parent, both[:1], "--print-alignment"))
    assert message.startswith("fairseq_cli.generate: --print-alignment needs the weights of softmax cross attention; train with")


def train(out, folder, *options):
    arch = ["--arch", "fast_weight_transformer", "--share-all-embeddings", "--optimizer", "adam", "--seed", 1]
    return fairseq("train", out / "bin", *USER_DIR, *arch, *TRAIN.split(), "--save-dir", folder, *options)


def test_label_smoothing_with_the_logs_of_the_memories(prepared, tmp_path):
    options = (
        "--criterion fast_weight_label_smoothed_cross_entropy --label-smoothing 0.1 --lr-scheduler inverse_sqrt --max-update 6"
    )
    out = prepared / "out"
    free, held = (
        succeed(train(out, tmp_path / name, *options.split(), "--state-norm-penalty", penalty))
        for name, penalty in (("free", 0), ("held", 10))
    )
    free, held = updates(free), updates(held)
    assert 0 < float(free[6]["fw_1_gate_beta"]) < 1
    assert float(free[6]["nll_loss"]) < float(free[1]["nll_loss"])
    assert float(held[6]["fw_1_state_norm"]) < float(free[6]["fw_1_state_norm"])
    chunks = updates(succeed(train(out, tmp_path / "chunks", *options.split(), "--loss-chunk", 7)))
    for name in ("loss", "nll_loss", "gnorm"):
        assert [float(log[name]) for log in chunks.values()] == pytest.approx([float(log[name]) for log in free.values()], rel=1e-3)


def test_training_mistakes(prepared, trained, tmp_path):
    out = prepared / "out"
    assert "--linear-attention has 'decode'; allowed, separated by commas: encoder, decoder, cross" in last_line(
        train(out, tmp_path, "--linear-attention", "encoder,decode", "--max-update", 1)
    )
    shutil.copy(out / "runs/dpfp2/checkpoint_best.pt", tmp_path / "checkpoint_last.pt")
    message = last_line(train(out, tmp_path, "--linear-attention", "decoder", "--lr-scheduler", "inverse_sqrt", "--max-update", 99))
    assert "give the options it was trained with" in message and "checkpoint_last.pt" in message
    assert os.listdir(tmp_path) == ["checkpoint_last.pt"]


def test_commands_for_language_models_say_what_they_take(trained, tmp_path):
    """Also where the data of the training have moved."""
    checkpoint = trained[0] / "runs/dpfp2/checkpoint_best.pt"
    with pytest.raises(ValueError, match=r"architecture 'fast_weight_transformer\w*'; fw-convert takes transformer_lm"):
        convert(checkpoint, tmp_path / "out.pt", "decay")
    for name, architectures in {"fw-explain": ("fast_weight_lm", "transformer_lm")}.items():
        with pytest.raises(ValueError, match=rf"holds a fast_weight_transformer\w*; {name} takes {' and '.join(architectures)}"):
            load_language_model(checkpoint, tmp_path / "none", name, architectures)


@pytest.mark.long
def test_multi30k_recipe(tmp_path):
    """One row with a linear decoder only, two updates and two test sets."""
    parallel_text.write(tmp_path, train=60, val=4, test_2016_flickr=4, test_2017_flickr=5)
    given = {"DATA": tmp_path, "OUT": tmp_path / "out", "UPDATES": 2, "TEST": "test_2016_flickr test_2017_flickr"}
    printed = succeed(recipe("../multi30k/table", "dpfp2-decoder", **given))
    for row in ("dpfp2-decoder", "dpfp2-decoder test1"):
        assert re.search(rf"^\| {row} \| [\d.]+ \| [\d.]+ \| [\d.]+ \|$", printed, re.MULTILINE)
    assert (tmp_path / "out/raw/test1.de").read_text() == (tmp_path / "test_2017_flickr.de").read_text()
    words = (tmp_path / "out/tok/train.en").read_text()
    assert words == words.lower()
