"""The examples of docs/extending.md, run as a reader would run them: in a folder of their own, outside of this package."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import programs
from support.commands import fairseq, succeed

ROOT = Path(__file__).parents[1]
FILE = re.compile(r"^```\w+\n((?:#!.*\n)?(?:#|//) (\S+\.\w+)\n.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every block whose first line names a file, as that file."""
    folder = tmp_path_factory.mktemp("extending")
    for code, name in FILE.findall((ROOT / "docs" / "extending.md").read_text(encoding="utf-8")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(code, encoding="utf-8")
    return folder


@pytest.mark.long
def test_every_example_holds(folder):
    """In one process, as most of the time is fairseq's import."""
    examples = sorted(path.name for path in folder.glob("try_*.py"))
    assert len(examples) == 3
    code = f"import runpy; [runpy.run_path(name) for name in {examples}]"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(folder)])}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_model_of_all_of_them_trains(folder):
    lines = (folder / "train.sh").read_text().replace("\\\n", " ").splitlines()
    [command] = [shlex.split(line) for line in lines if line.startswith("fairseq-train")]
    log = succeed(fairseq("train", *command[1:], cwd=folder))
    losses = [float(loss) for loss in re.findall(r"\| valid on 'valid' subset \| loss ([\d.]+)", log)]
    assert len(losses) == 2 and losses[1] < losses[0] and (folder / "run" / "checkpoint_best.pt").is_file()


def test_the_recipe_runs(folder):
    """Beside the parts that recipes share, and the package."""
    shutil.copy(ROOT / "recipes" / "lib.sh", folder / "recipes")
    (folder / "fw_fairseq").symlink_to(ROOT / "fw_fairseq")
    environment = os.environ | {"TOY": "1", "BIN": programs.folder(), "OMP_NUM_THREADS": "1"}
    recipe = ["bash", "recipes/forgetting/train.sh"]
    done = subprocess.run([*recipe, "gated"], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "accuracy" in done.stdout, done.stdout + done.stderr
    assert (folder / "outputs" / "forgetting_toy" / "gated" / "checkpoint_last.pt").is_file()
    wrong = subprocess.run([*recipe, "sum"], cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert wrong.returncode == 1 and wrong.stderr.endswith("ROW is sum; it must be gated, decay or gated_delta\n")
