"""What recipes do around a training: trials, shares of a batch, progress, the status of runs, and what they say of a failure."""

from __future__ import annotations

import fcntl
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fairseq.data import Dictionary, indexed_dataset
from support.commands import ENVIRONMENT, ROOT, succeed
from support.recipes import load, recipe

TRIALS = {  # a step that trains, and those that come before it
    "additive/train.sh windowed": ["prepare.sh"],
    "baevski_auli/finetune.sh decay-4": ["prepare.sh", "convert.sh decay-4"],
    "enwik8/train.sh delta": ["prepare.sh"],
    "gpt2/finetune.sh decay-4-phi": ["prepare.sh", "convert.sh decay-4-phi"],
    "terraformer/train.sh terraformer": ["prepare.sh"],
    "wikitext103/train.sh small-delta": ["prepare.sh"],
    "wmt14/train.sh dpfp2": ["prepare.sh"],
}


def common(script: str, **variables) -> subprocess.CompletedProcess:
    """Runs lines of bash after lib.sh."""
    command = ["bash", "-c", f"source recipes/lib.sh; {script}", "some.sh"]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT | variables, capture_output=True, text=True, timeout=60)


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("step", sorted(TRIALS, key=lambda step: "wikitext103" not in step))
def test_a_trial(step, tmp_path):
    """It trains, saves, reads and evaluates in a folder of its own, and the real run finds nothing of it."""
    name, out = step.split("/")[0], tmp_path / "out_toy"
    for before in TRIALS[step]:
        script, *row = before.split()
        succeed(recipe(f"{name}/{script}", out, *row))
    script, row = step.split()
    before = set(out.rglob("*"))
    printed = succeed(recipe(script, out, row, CHECK="3"))
    speed, disk = (
        printed.splitlines()[-2:] if printed.splitlines()[-1].startswith(f"{row}: ") else re.findall(rf"{row}: .*", printed)
    )
    assert re.fullmatch(rf"{row}: [\d,]+ words/s, [\d.e+-]+ seconds an update; [\d,]+ updates take [\d.]+ hours", speed), speed
    assert re.fullmatch(rf"{row}: [\d.]+ [MG]B of memory; [\d.]+ MB for a checkpoint, [\d.]+ MB for the run: .*", disk), disk
    made = {path for path in set(out.rglob("*")) - before if path.is_file()}
    assert made and not [path for path in made if path.suffix in (".pt", ".idx")]
    assert all(f"{row}.check" in str(path) for path in made), made
    [log] = [path.read_text() for path in made if path.name == "train.log"]
    assert "num_updates: 3 >= max_update: 3" in log


def test_recipes_without_trials_refuse_them(tmp_path):
    script = f"OUT={tmp_path}; train {tmp_path}/run {tmp_path}/data"
    done = common(f"PYTHON=python; {script}", CHECK="1", CPU="1")
    assert done.returncode == 1 and "CHECK is set, and this recipe has no trial; leave CHECK out" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "whole, gpus, at_once, options, said",
    [
        (96, 1, None, "96 1", None),
        (96, 1, 48, "48 2", None),
        (96, 2, 20, "16 3", None),
        (96, 2, 100, "48 1", None),
        (26, 4, None, "7 1", "28 in its batch, and 26 in the paper: 4 GPUs take 7 each, 1 times"),
        (26, 8, None, "3 1", "24 in its batch, and 26 in the paper: 8 GPUs take 3 each, 1 times"),
        (26, 1, 8, "7 4", "28 in its batch, and 26 in the paper: 1 GPUs take 7 each, 4 times"),
        (2, 8, None, "1 1", "8 in its batch, and 2 in the paper: 8 GPUs take 1 each, 1 times"),
        (172032, 3, 3584, "3584 16", None),
    ],
)
def test_the_batch_is_shared_by_any_number_of_gpus(whole, gpus, at_once, options, said):
    batch = {"BATCH": str(at_once)} if at_once else {}
    done = common(f"share {whole} --batch-size; echo ${{batch[@]}}", GPUS=str(gpus), **batch)
    part, times = options.split()
    assert succeed(done).splitlines()[0] == f"--batch-size {part} --update-freq {times}"
    assert done.stderr == (f"some.sh: an update has {said}\n" if said else "")


def test_all_cores_prepare_text_whatever_the_threads_are():
    for variables in ({}, {"OMP_NUM_THREADS": "1", "OMP_THREAD_LIMIT": "1"}):
        cores = subprocess.run(["getconf", "_NPROCESSORS_ONLN"], capture_output=True, text=True, check=True).stdout
        assert succeed(common("echo $WORKERS", **variables)) == cores


@pytest.mark.parametrize(
    "command, said",
    [
        (
            "kill -9 $BASHPID",
            ["signal 9 ended the command; the same command continues", "where memory runs out: set BATCH to half"],
        ),
        ("kill -15 $BASHPID", ["signal 15 ended the command; the same command continues"]),
        ("echo torch.OutOfMemoryError; false", ["memory ran out: set BATCH to half of what a GPU computes at once"]),
        ("echo something else; false", []),
    ],
)
def test_a_command_that_fails_is_explained(command, said, tmp_path):
    done = common(f"work() {{ {command}; }}; logged {tmp_path}/log work; echo went on")
    assert done.returncode == 1 and not done.stdout
    found = [line for line in done.stderr.splitlines() if line.startswith("some.sh: ")]
    assert len(found) == len(said) and all(text in line for text, line in zip(said, found)), done.stderr


def test_lines_that_say_how_far_a_command_is_are_shown(tmp_path):
    lines = ["a line", "x | INFO | y | evaluated 1,000 of 9,000 words, 20 words/s, 7 minutes left", "    20 / 90 wps=17"]
    done = common(f"work() {{ printf '%s\\n' {' '.join(map(repr, lines))}; }}; logged {tmp_path}/log work")
    assert (tmp_path / "log").read_text().splitlines() == lines and done.returncode == 0
    assert done.stderr.splitlines() == ["evaluated 1,000 of 9,000 words, 20 words/s, 7 minutes left", "20 / 90 wps=17"]


@pytest.mark.parametrize(
    "name, variables, said",
    [
        ("baevski_auli", {"CHECKPOINT": "nowhere.pt"}, "CHECKPOINT is nowhere.pt, which is not a file"),
        (
            "baevski_auli",
            {"CHECKPOINT": "there"},
            "DICT is ./dict.txt, which is not a file; it must be the dictionary of CHECKPOINT",
        ),
        ("baevski_auli", {"CHECKPOINT": "there", "DICT": "there", "DATA": "."}, "./train.txt is missing; DATA must be the folder"),
        ("wikitext103", {"DICT": "nowhere.txt"}, "DICT is nowhere.txt, which is not a file"),
        ("gpt2", {"DATA": "."}, ". has neither train.jsonl nor train.txt; DATA must have one of them"),
        ("gpt2", {"DATA": "texts", "MODEL": "."}, "./config.json is missing; MODEL must be a folder of GPT-2"),
    ],
)
def test_files_are_checked_before_the_work_begins(name, variables, said, tmp_path):
    (tmp_path / "texts").mkdir()
    for file in ("there", "texts/train.txt", "texts/valid.txt", "texts/test.txt"):
        (tmp_path / file).touch()
    done = recipe(f"{name}/prepare.sh", tmp_path / "out", cwd=tmp_path, TOY="", **variables)
    assert done.returncode == 1 and said in done.stderr.splitlines()[-1] and not list(tmp_path.glob("out/*"))


def binarised(folder: Path, name: str, *lines: list[int]) -> list[list[int]]:
    builder = indexed_dataset.MMapIndexedDatasetBuilder(str(folder / f"{name}.bin"))
    for line in lines:
        builder.add_item(torch.tensor(line))
    builder.finalize(str(folder / f"{name}.idx"))
    return [line.tolist() for line in indexed_dataset.MMapIndexedDataset(str(folder / name))]


def test_the_beginning_of_a_text(tmp_path):
    """Words of a text, or sentences of one in two languages."""
    Dictionary().save(str(tmp_path / "dict.txt"))
    binarised(tmp_path, "test", [4, 5, 2], [6, 2], [7, 8, 9, 2])
    for language in ("en", "de"):
        binarised(tmp_path, f"valid.en-de.{language}", [4, 2], [5, 6, 2], [7, 2])
    cut = load("cut.py").main
    for count, expected in ((2, [[4, 5]]), (6, [[4, 5, 2], [6, 2], [7]]), (99, [[4, 5, 2], [6, 2], [7, 8, 9, 2]])):
        cut(tmp_path, "test", count, tmp_path / "first")
        found = indexed_dataset.MMapIndexedDataset(str(tmp_path / "first" / "test"))
        assert [line.tolist() for line in found] == expected and (tmp_path / "first" / "dict.txt").exists()
    cut(tmp_path, "valid", 2, tmp_path / "first")
    for language in ("en", "de"):
        found = indexed_dataset.MMapIndexedDataset(str(tmp_path / "first" / f"valid.en-de.{language}"))
        assert [line.tolist() for line in found] == [[4, 2], [5, 6, 2]]
    with pytest.raises(SystemExit, match="has no binarised text train"):
        cut(tmp_path, "train", 2, tmp_path / "first")


def line(**numbers) -> str:
    return f"2026-01-01 | INFO | train_inner | {json.dumps({name: str(x) for name, x in numbers.items()})}"


def test_the_status_of_runs(tmp_path, capsys):
    options = (
        "x | INFO | fairseq_cli.train | train.py data --max-update 100 --max-update 2000\nx | INFO | fairseq_cli.train | task: T"
    )
    step = line(epoch=1, update=0.5, ppl=40.5, wps=900, ups=0.5, num_updates=500)
    ends = {
        "finished": "2026-01-01 | INFO | fairseq_cli.train | done training in 1.0 seconds",
        "running": "",
        "stopped": "SIGTERM stopped the run after update 500, with a checkpoint; exit code 75",
    }
    for name, end in ends.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.log").write_text(f"{options}\n{step}\n{end}\n")
    checkpoint = tmp_path / "stopped" / "checkpoint_1_500.pt"
    checkpoint.write_bytes(bytes(2_000_000))
    checkpoint.with_name("checkpoint_last.pt").hardlink_to(checkpoint)
    program = (
        "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print('locked', flush=True); input()"
    )
    command = [sys.executable, "-c", program, tmp_path / "running" / ".lock"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        other.stdout.readline()
        load("status.py").main(str(tmp_path))
        other.communicate("\n")
    head, *rows = [re.split(r"  +", text) for text in capsys.readouterr().out.splitlines()]
    assert len(head) == 9 and rows == [
        ["finished", "finished", "500 of 2,000", "40.5", "900", "0 seconds ago", "0.0 MB"],
        ["running", "running", "500 of 2,000", "40.5", "900", "0.8", "0 seconds ago", "0.0 MB"],
        ["stopped", "stopped", "500 of 2,000", "40.5", "900", "0.8", "0 seconds ago", "2.0 MB"],
    ]
    assert fcntl.lockf((tmp_path / "running" / ".lock").open("r+"), fcntl.LOCK_EX | fcntl.LOCK_NB) is None


def test_epochs_bound_a_run_of_translation(tmp_path):
    """Its log is of another form, and its best score is BLEU."""
    log = ["x | INFO | fairseq_cli.train | train.py data --max-epoch 45", "x | INFO | fairseq_cli.train | task: T"]
    log += [
        f"x | INFO | train_inner | epoch 001:   {n} / 4201 loss=9.2, ppl=500.1, wps=90, ups=2, num_updates={n}" for n in (100, 200)
    ]
    log += ["x | INFO | valid | epoch 001 | valid on 'valid' subset | loss 9 | ppl 400 | bleu 1.25 | num_updates 200"]
    (tmp_path / "train.log").write_text("\n".join(log) + "\n")
    status = load("status.py")
    shown = status.row(status.Run(tmp_path), tmp_path)
    assert shown[2:5] == ["200 of 189,045", "500.1", "BLEU 1.25"] and shown[6] == f"{(189045 - 200) / 2 / 3600:.1f}"


def test_idle_gpus_are_named(tmp_path):
    module = (
        "class cuda:\n    device_count = staticmethod(lambda: 8)\n    get_device_capability = staticmethod(lambda number: (9, 0))\n"
    )
    (tmp_path / "torch.py").write_text(module)
    script = (
        f"PYTHON={sys.executable}; export PYTHONPATH={tmp_path}; default_precision=fp16; choose_precision; echo ${{machine[@]}}"
    )
    for given, said in (({}, "some.sh: 1 of 8 GPUs is used; GPUS=8 uses all\n"), ({"GPUS": "8"}, ""), ({"LAUNCH": "torchrun"}, "")):
        done = common(script, CPU="0", **given)
        assert (done.stdout, done.stderr) == ("--bf16\n", said)
