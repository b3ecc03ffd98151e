"""Later calls of recipes/demo.sh with the same OUT, with programs that write what it reads of fairseq's and compute nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.commands import ENVIRONMENT, ROOT, succeed

PROGRAM = f"""#!{sys.executable} -IS
import os, pathlib, sys
name, args = os.path.basename(sys.argv[0]), sys.argv[1:]
given = lambda option: pathlib.Path(args[args.index(option) + 1])
if "fairseq_cli.train" in args:
    print(f"Saved checkpoint x.pt (epoch 1 @ {{given('--max-update')}} updates, score 5.2) (writing took 0.1 seconds)")
elif "fw_fairseq.tools.bench" in args:
    given("--json").write_text("{{}}")
elif name == "fairseq-preprocess":
    given("--destdir").mkdir()
    (given("--destdir") / "dict.txt").write_text("word 1\\n")
elif name == "fairseq-eval-lm":
    print("Loss (base 2): 5, Perplexity: 32")
elif name == "fairseq-interactive":
    print(f"H-0\\t-1\\t{{sys.stdin.read().strip()}}, on and on")
"""
MODELS = ("gated_delta", "transformer")


@pytest.fixture
def demo(tmp_path):
    """Calls the recipe; what it writes is in ``out``."""
    (tmp_path / "bin").mkdir()
    for name in ("python", *(f"fairseq-{tool}" for tool in ("train", "preprocess", "eval-lm", "interactive"))):
        (tmp_path / "bin" / name).write_text(PROGRAM)
        (tmp_path / "bin" / name).chmod(0o755)

    def call(**variables):
        environment = ENVIRONMENT | {"VIRTUAL_ENV": str(tmp_path), "OUT": str(tmp_path / "out"), "TOY": ""} | variables
        command = ["bash", str(ROOT / "recipes" / "demo.sh")]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    return call


def steps(done) -> list[str]:
    return [line.removeprefix("== ") for line in succeed(done).splitlines() if line.startswith("== ")][:-1]


def test_a_second_call_only_prints(demo):
    assert "testing transformer, sliding" in steps(demo()) and steps(demo()) == []


def test_an_unfinished_sample_is_made_again(demo, tmp_path):
    demo()
    unfinished = tmp_path / "out" / "transformer" / "sample.log"
    unfinished.write_text("loading model(s)\n")
    assert steps(demo()) == ["transformer continues: if the object is"]
    assert unfinished.read_text() == "H-0\t-1\tif the object is, on and on\n"


def test_another_prompt_is_continued(demo, tmp_path):
    demo()
    assert steps(demo(PROMPT="if the class has")) == [f"{model} continues: if the class has" for model in MODELS]
    assert steps(demo(PROMPT="if the class has")) == []
    samples = [(tmp_path / "out" / model / "sample.log").read_text() for model in MODELS]
    assert samples == ["H-0\t-1\tif the class has, on and on\n"] * 2
    (tmp_path / "out" / "transformer" / "prompt").unlink()
    assert steps(demo(PROMPT="if the class has")) == ["transformer continues: if the class has"], "of which prompt is not known"


def test_more_updates_train_on_and_fewer_are_refused(demo, tmp_path):
    demo(UPDATES="200")
    assert {f"training {model}, 400 updates" for model in MODELS} < {*steps(demo(UPDATES="400"))}
    said = "gated_delta has had 400 updates; UPDATES is 200 and must be at least 400, or OUT another folder"
    kept = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    done = demo(UPDATES="200")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"demo.sh: OUT is {tmp_path}/out, where {said}\n")
    assert kept == {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}


def test_updates_of_a_run_that_was_stopped_count(demo, tmp_path):
    """Fewer than its last checkpoint has had are refused, and more are not."""
    demo(UPDATES="200")
    with (tmp_path / "out" / "transformer" / "train.log").open("a") as log:
        log.write("Saved checkpoint x.pt (epoch 2 @ 350 updates, score 5.2) (writing took 0.1 seconds)\n")
    assert "where transformer has had 350 updates; UPDATES is 300 and must be at least 350" in demo(UPDATES="300").stderr
    assert {f"training {model}, 350 updates" for model in MODELS} < {*steps(demo(UPDATES="350"))}


def test_an_interrupted_measurement_is_made_again(demo, tmp_path):
    """Its report is written after each length."""
    demo()
    report = tmp_path / "out" / "generation.json"
    report.rename(f"{report}.part")
    assert steps(demo()) == ["generation at growing length"]
    assert report.exists() and not list(report.parent.glob("*.part"))
