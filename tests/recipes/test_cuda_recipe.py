"""recipes/gpu_check.sh: one sentence without a GPU; its steps and its report with stand-ins for them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.kernel_rules import CHANNEL_RULES, KERNEL_RULES
from support.recipes import load

from fw_fairseq.tools.bench import __main__ as bench

ROOT = Path(__file__).parents[2]


@pytest.fixture
def recipe():
    return load("gpu_check/run.py")


def test_without_a_gpu(tmp_path):
    env = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([ROOT / "recipes" / "gpu_check.sh", tmp_path / "out"], env=env, capture_output=True, text=True)
    assert done.returncode == 3 and done.stdout == ""
    assert done.stderr == "gpu_check needs a CUDA device, and torch sees none\n"


def test_paths_of_the_caller(tmp_path):
    """PYTHONPATH stays, behind this package; OUT is relative to where the recipe was called."""
    (tmp_path / "python").write_text('#!/bin/sh\necho "$PYTHONPATH $2"\n')
    (tmp_path / "python").chmod(0o755)
    env = os.environ | {"PYTHON": str(tmp_path / "python"), "PYTHONPATH": "/wheels:/more"}
    command = [ROOT / "recipes" / "gpu_check.sh", "results/gpu"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"{ROOT}:/wheels:/more {tmp_path / 'results/gpu'}\n" and (tmp_path / "results" / "gpu").is_dir()


def test_steps(recipe, tmp_path, monkeypatch):
    """In time: all but the last two surely, with options that fw-bench knows, the sanitizer from the toolkit."""
    monkeypatch.setattr(recipe.shutil, "which", lambda name, path=None: path and f"{path}/{name}")
    monkeypatch.setattr(recipe.importlib.util, "find_spec", lambda name: object())
    steps = recipe.steps(tmp_path)
    names = ["tests", "kernels", "memcheck", "racecheck", "ops", "model", "model_eager", "mixers", "speed", "ops_32", "peers"]
    assert [name for name, _, _ in steps] == names
    assert sum(limit for _, limit, _ in steps[:-2]) <= recipe.TOTAL == 900
    scripts = ("mixers", "speed", "peers")
    parsed = {name: bench.build_parser().parse_args(command[3:]) for name, _, command in steps[4:] if name not in scripts}
    assert [name for name, args in parsed.items() if args.command == "ops" and args.no_peers] == ["ops", "ops_32"]
    graphs, eager = parsed["model"], parsed["model_eager"]
    assert not graphs.no_decoding_graph and eager.no_decoding_graph
    assert set(eager.mixers) <= set(graphs.mixers) and set(eager.contexts) <= set(graphs.contexts)
    given = [ROOT / part for _, _, command in steps for part in command if part.endswith(".py")]
    assert len(given) == 7 and all(path.is_file() for path in given)
    assert "/usr/local/cuda/bin/compute-sanitizer" in steps[2][2] and "PYTORCH_NO_CUDA_MEMORY_CACHING=1" in steps[3][2]


def test_a_step_ends_with_all_its_processes(recipe, tmp_path):
    """What it started would share the GPU with the next one."""
    code = "import subprocess, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    step = recipe.run("hangs", 1, [sys.executable, "-S", "-c", code], tmp_path)
    assert step["code"] == "stopped after 1 s"
    for _ in range(200):
        if not runs(int(step["tail"][0])):
            return
        time.sleep(0.05)
    raise AssertionError("its process still runs")


def runs(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


def test_no_time_left(recipe, tmp_path):
    step = recipe.run("late", 0, ["no such command"], tmp_path)
    assert step["code"] == "no time left" and step["tail"] == []


def test_kernels_says_all_that_went_wrong(monkeypatch, capsys):
    def fail():
        raise RuntimeError("does not compile")

    kernels = load("gpu_check/kernels.py")
    stand_ins = {"good": (1e-2, lambda: 1e-3), "off": (1e-2, lambda: 0.5), "broken": (1e-2, fail), "nan": (1e-2, lambda: math.nan)}
    monkeypatch.setattr(kernels, "cases", lambda: stand_ins)
    assert kernels.main(1) == 1
    wrong = ["off: 5.0e-01, above 1e-02", "broken: RuntimeError: does not compile", "nan: nan, above 1e-02"]
    assert capsys.readouterr().out.splitlines() == ["good: 1.0e-03", *wrong, "3 of 4 went wrong", *wrong]
    got, want = [torch.ones(2), torch.tensor([math.nan])], [torch.ones(2).double(), torch.ones(1).double()]
    assert math.isnan(kernels.largest_error(got, want))


def test_kernels_has_every_rule_that_a_family_computes():
    cases = load("gpu_check/kernels.py").cases()
    rules = {name.split()[0] for name in cases} - {"sru", "sru,", "pool,", "attention", "read", "sparse"}
    assert rules == {*KERNEL_RULES, *CHANNEL_RULES} and len(cases) == 3 * (len(rules) + 3 + 3 + 1 + 2 + 2 + 6)


def test_kernels_on_the_emulator(emulate, monkeypatch):
    """The cases that PyTorch has no part in, small as they are; a wrong kernel would show."""
    kernels, launcher = load("gpu_check/kernels.py"), emulate()
    monkeypatch.setattr(kernels, "DEVICE", "cpu")
    names = [f"{name} torch.bfloat16" for name in ("attention norm of gated", "read")]
    assert all(kernels.outcome(name)[1] for name in names), [kernels.outcome(name) for name in names]
    assert [name for _, name, _ in launcher.calls] == [
        "linear_forward",
        "divided_backward",
        "linear_backward",
        "step",
        "read_memory",
    ]
    read = kernels.kernel.read
    monkeypatch.setattr(kernels.kernel, "read", lambda *given: read(*given).mul_(1.2))
    assert not kernels.outcome(names[1])[1]


class Device:
    """Stands in for torch.cuda, with a clock for the host and one for what the device has been given to do."""

    def __init__(self):
        self.host, self.asleep, self.busy = 0.0, 0.0, 0.0

    def synchronize(self):
        self.host = max(self.host, self.busy)

    def _sleep(self, cycles: int):
        self.asleep = cycles / 2e9
        self.busy = max(self.busy, self.host) + self.asleep

    def Event(self, enable_timing: bool):
        event = SimpleNamespace(time=None)
        event.record = lambda: setattr(event, "time", max(self.busy, self.host))
        event.elapsed_time = lambda end: 1e3 * (end.time - event.time)
        return event


@pytest.mark.parametrize("device_ms, calls", [(3.0, 20), (0.5, 20), (0.5, 3)])
def test_speed_keeps_host_and_device_apart(device_ms, calls):
    """Also where the host is slower than the device, which then would wait for it."""
    speed, device = load("gpu_check/speed.py"), Device()

    def call():
        device.host += 2e-3
        device.busy = max(device.busy, device.host) + device_ms / 1e3

    found = speed.measure(call, calls, device, lambda: device.host)
    assert found["host_ms"] == pytest.approx(2) and found["device_ms"] == pytest.approx(device_ms)
    assert device.asleep > calls * 2e-3


def test_speed_runs_every_case():
    """Small, in PyTorch: every case has its passes, and rows start where they should."""
    speed = load("gpu_check/speed.py")
    assert {case.rule for case in speed.CASES} == set(speed.ALL) <= {*KERNEL_RULES, *CHANNEL_RULES}
    for case in {case._replace(batch=1, heads=1, tokens=4) for case in speed.CASES}:
        x = speed.draw(case, "cpu")
        assert (x["q"].data_ptr() % 16 == 0 and x["q"].stride(2) % 8 == 0) == case.aligned
        for call in speed.passes(case, x).values():
            call()


WITHOUT_FAIRSEQ = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("fairseq", "fairseq_cli", "hydra", "omegaconf"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""


def test_without_fairseq():
    """As on a machine with torch, CuPy and pytest only: what the steps import is there."""
    code = """
sys.path[:0] = ["recipes/gpu_check", "docs/results/benchmarks"]
import kernels, run, speed
assert run.lacks("fairseq") and not run.lacks("torch")
import fw_fairseq.tools.bench.ops, layers
import pytest
sys.exit(pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", "-m", "gpu", "tests/kernels/test_cuda_gpu.py"]))
"""
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # hydra brings one
    command = [sys.executable, "-c", WITHOUT_FAIRSEQ + code]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("installed", [True, False])
def test_a_step_that_needs_fairseq_is_named(recipe, tmp_path, monkeypatch, capsys, installed):
    monkeypatch.setattr(recipe.CupyLaunch, "why_not", lambda self, device: None)
    monkeypatch.setattr(recipe, "machine", lambda: {})
    monkeypatch.setattr(recipe, "lacks", lambda package: not installed)
    monkeypatch.setattr(recipe, "steps", lambda out: [(name, 20, [sys.executable, "-S", "-c", ""]) for name in ("ops", "model")])
    assert recipe.main(tmp_path) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert [step["step"] for step in report["steps"]] == (["ops", "model"] if installed else ["ops"])
    told = "fairseq is not installed, so these steps are skipped: model, model_eager"
    assert report["skipped"] == ([] if installed else ["model", "model_eager"]) and (told in capsys.readouterr().out) == (
        not installed
    )


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


@pytest.fixture
def beside_fla():
    return load("gpu_check/beside_fla.py")


def test_tuning_is_short(beside_fla):
    """The two most usual configurations of each kernel are left."""

    def config(warps, stages, **sizes):
        return SimpleNamespace(num_warps=warps, num_stages=stages, kwargs=sizes)

    usual, wide, few = config(4, 2, BK=32), config(4, 2, BK=64), config(1, 4, BK=128)
    tuner = SimpleNamespace(configs=[few, usual, wide])
    beside_fla.tune_less([tuner])
    assert tuner.configs == [wide, usual]


def test_tiles_are_halved_for_keys_64_wide_only(beside_fla, monkeypatch):
    asked = []

    def original(q):
        asked.append((q.shape[-1], chunk_o.check_shared_mem()))

    chunk_o = SimpleNamespace(TRITON_ABOVE_3_7_1=False, chunk_bwd_dqkwg=original, check_shared_mem=lambda: True)
    other = SimpleNamespace(chunk_bwd_dqkwg=original)
    monkeypatch.setitem(sys.modules, "a module of fla", chunk_o)
    monkeypatch.setitem(sys.modules, "another of fla", other)
    beside_fla.narrow_tiles(chunk_o)
    for width in (64, 128, 64):
        other.chunk_bwd_dqkwg(torch.empty(1, width))
    assert asked == [(64, False), (128, True), (64, False)] and chunk_o.check_shared_mem() and chunk_o.TRITON_ABOVE_3_7_1


def test_kernels_beside_those_of_a_peer(beside_fla):
    """Every call runs, and a peer that fails is named and does not end the table."""
    ran = []

    def timed(call):
        call()
        ran.append(call)
        return {"device_ms": float(len(ran))}

    def peer(rule, q, k, v, gates):
        assert q.dtype == torch.bfloat16 and all(gate.min() >= 0.9 for gate in gates.values())
        return lambda: torch.zeros(1)

    row = beside_fla.compared("gated_delta", (1, 2, 20, 8), peer, "cpu", timed)
    assert (row["forward_ms"], row["both_ms"], row["fla_both_ms"]) == (1.0, 2.0, 3.0) and row["tuning_s"] >= 0
    row = beside_fla.compared("sum", (1, 2, 20, 8), lambda *given: 1 / 0, "cpu", timed)
    assert row["failed"] == "ZeroDivisionError: division by zero" and row["both_ms"] == 5.0


@pytest.mark.long
def test_trainings_of_recipes(tmp_path):
    """The toy's models on the CPU, softmax attention of fairseq's own model among them; what is not there is said."""
    command = [sys.executable, ROOT / "recipes" / "gpu_check" / "training.py", tmp_path / "out.json"]
    cases = ["wikitext103/train.sh", "small-delta", "fp32", "baevski_auli/finetune.sh", "softmax", "fp32"]
    subprocess.run([*command, *cases], env=os.environ | {"TOY": "1"}, check=True, capture_output=True, timeout=400)
    rows = json.loads((tmp_path / "out.json").read_text())
    cases = [("small-delta", False), ("small-delta", True), ("softmax", False), ("softmax", True)]
    assert [(row["row"], row["graphs"]) for row in rows] == cases
    for row in rows:
        if "not there" in row:
            assert row["graphs"] and row["not there"] == "--graph-training"
        else:
            tokens = row["tokens_per_second"] * row["update_ms"] / 1e3
            assert tokens == pytest.approx(8 * 32 if row["row"] == "small-delta" else 26 * 32)
            assert row["passes_ms"] >= row["passes_host_ms"] > 0


def test_device_time_by_kind_of_kernel(monkeypatch):
    training = load("gpu_check/training.py")
    names = {"delta_forward": 6, "ampere_gemm": 3, "flash_fwd": 3, "softmax_warp": 3, "elementwise": 9}
    events = [SimpleNamespace(key=name, self_device_time_total=1000.0 * n, count=n) for name, n in names.items()]
    found = training.by_kind(events)
    assert found["device_ms"] == {"own": 2.0, "products": 1.0, "attention": 1.0, "softmax": 1.0, "other": 3.0}
    assert found["launches"] == pytest.approx(8)


def test_arguments_of_softmax_attention():
    training = load("gpu_check/training.py")
    given = ["data", "--arch", "fast_weight_lm_baevski_auli", "--update-rule", "decay", "--feature-dim", "32", "--lr", "1"]
    assert training.of_softmax(given) == ["data", "--arch", "transformer_lm_wiki103", "--lr", "1", "--decoder-attention-heads", "8"]
