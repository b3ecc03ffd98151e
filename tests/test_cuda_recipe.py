"""recipes/gpu_check.sh: one sentence without a GPU; its steps and its report with stand-ins for them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fw_fairseq import bench

ROOT = Path(__file__).parents[1]


@pytest.fixture
def recipe():
    spec = importlib.util.spec_from_file_location("gpu_check_run", ROOT / "recipes" / "gpu_check" / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_a_gpu(tmp_path):
    env = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([ROOT / "recipes" / "gpu_check.sh", tmp_path / "out"], env=env, capture_output=True, text=True)
    assert done.returncode == 3 and done.stdout == ""
    assert done.stderr == "gpu_check needs a CUDA device, and torch sees none\n"


def test_steps_stay_under_nine_minutes(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe.shutil, "which", lambda name: f"/usr/bin/{name}")
    steps = recipe.steps(tmp_path)
    assert [name for name, _, _ in steps] == ["tests", "kernels", "memcheck", "racecheck", "ops", "model", "mixers"]
    assert sum(limit for _, limit, _ in steps) < 540
    for name, _, command in steps[-3:]:  # fw-bench knows every option
        assert bench.build_parser().parse_args(command[3:]).command == name


@pytest.mark.parametrize("failing", [None, "ops"])
def test_report(recipe, tmp_path, monkeypatch, failing):
    """Steps that fail or hang are in the report, and the figures of the others too."""
    monkeypatch.setattr(recipe.CupyLaunch, "why_not", lambda self, device: None)
    monkeypatch.setattr(recipe, "machine", lambda: {"device": "stand-in"})

    def steps(out):
        write = f"import json, pathlib; pathlib.Path({str(out / 'model.json')!r}).write_text(json.dumps([1, 2])); print('done')"
        codes = {"ops": (20, "raise SystemExit(4)" if failing else "pass"), "model": (20, write)}
        codes["tests"] = (1, "import time; time.sleep(30)" if failing else "pass")
        return [(name, limit, [sys.executable, "-S", "-c", code]) for name, (limit, code) in codes.items()]

    monkeypatch.setattr(recipe, "steps", steps)
    assert recipe.main(tmp_path) == bool(failing)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["machine"] == {"device": "stand-in"} and report["versions"]["torch"]
    assert [step["code"] for step in report["steps"]] == ([4, 0, "stopped after 1 s"] if failing else [0, 0, 0])
    assert report["model"] == [1, 2] and report["ops"] is None and report["steps"][1]["tail"] == ["done"]
