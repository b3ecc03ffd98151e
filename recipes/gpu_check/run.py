"""Runs the steps of recipes/gpu_check.sh one after the other and writes one report."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from fw_fairseq.ops.kernels.compiler import CupyLaunch

HERE = Path(__file__).parent
TOOLKIT = "/usr/local/cuda/bin"  # often not in PATH
PACKAGES = ("torch", "numpy", "cupy-cuda13x", "cupy-cuda12x", "triton", "flash-linear-attention", "fw_fairseq")
SANITIZER_TOOLS = {"memcheck": ["--report-api-errors", "no"], "racecheck": []}  # torch and CuPy try calls that fail, and go on
FIGURES = ("ops", "model", "model_eager", "mixers", "speed", "ops_32", "peers")
NEEDS_FAIRSEQ = ("model", "model_eager")  # steps
TOTAL = 900  # seconds for all steps
PROCESSES = min(12, os.cpu_count() or 1)  # that compile side by side


def steps(out: Path) -> list[tuple[str, int, list[str]]]:
    """(name, seconds that it may take, command). What kernels.py compiles in several processes the sanitizers find in CuPy's cache.
    The last two go without where the others took their time."""
    device = ["--device", "cuda", "--rounds", "5"]
    python = [sys.executable, "-m"]
    bench = [*python, "fw_fairseq.tools.bench"]
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=TOOLKIT)
    workers = ["-n", str(PROCESSES)] if importlib.util.find_spec("xdist") else []
    kernels = [sys.executable, str(HERE / "kernels.py")]
    ops = ["ops", *device, "--dtype", "bfloat16"]
    few = [*ops, "--no-peers", "--tokens", "512", "2048", "8192", "--batch", "8", "--cumsum-up-to", "512", "--feature-map", "dpfp"]
    full = [*ops, "--batch", "32", "--loop-up-to", "0", "--cumsum-up-to", "0", "--softmax-up-to", "2048"]  # no processor is idle
    many, peers = [*full, "--no-peers", "--tokens", "512", "2048"], [*full, "--tokens", "2048"]
    model = ["model", *device, "--mixers", "delta", "decay", "--tokens", "512", "2048", "--contexts", "256", "4096"]
    model += ["--hypotheses", "8"]
    eager = [
        "model",
        *device,
        "--mixers",
        "delta",
        "--tokens",
        "64",
        "--contexts",
        "256",
        "--hypotheses",
        "8",
        "--no-decoding-graph",
    ]
    scripts = HERE.parents[1] / "docs" / "results" / "benchmarks"
    mixers = [
        sys.executable,
        str(scripts / "layers.py"),
        *device,
        "--width",
        "1024",
        "--heads",
        "16",
        "--length",
        "512",
        "--tokens",
        "8192",
    ]
    outputs = {name: ["--json", str(out / f"{name}.json"), "--figure", str(out / f"{name}.svg")] for name in FIGURES}
    found = [
        ("tests", 240, [*python, "pytest", "-m", "gpu", "-rs", *workers, "tests/kernels/test_cuda_gpu.py"]),
        ("kernels", 120, [*kernels, str(PROCESSES)]),
        *((tool, 100, sanitized(sanitizer, tool, kernels)) for tool in SANITIZER_TOOLS if sanitizer),
        ("ops", 90, [*bench, *few, *outputs["ops"]]),
        ("model", 65, [*bench, *model, *outputs["model"]]),
        ("model_eager", 30, [*bench, *eager, *outputs["model_eager"]]),  # what graphs are worth
        ("mixers", 35, [*mixers, *outputs["mixers"][:2]]),
        ("speed", 40, [sys.executable, str(HERE / "speed.py"), str(out / "speed.json")]),
        ("ops_32", 60, [*bench, *many, *outputs["ops_32"]]),
    ]
    if importlib.util.find_spec("fla"):  # tunes its kernels first, perhaps for minutes
        found.append(("peers", 300, [sys.executable, str(scripts / "peers.py"), *peers[1:], *outputs["peers"]]))
    return found


def lacks(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is None
    except ModuleNotFoundError:
        return True


def sanitized(sanitizer: str, tool: str, command: list[str]) -> list[str]:
    """Each tensor in an allocation of its own: what is between two tensors of torch's cache counts as allocated."""
    options = ["--tool", tool, "--error-exitcode", "9", *SANITIZER_TOOLS[tool]]
    return ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", sanitizer, *options, *command]


def run(name: str, limit: int, command: list[str], out: Path) -> dict:
    start = time.monotonic()
    with (out / f"{name}.log").open("w") as log:
        code = f"stopped after {limit} s" if limit > 0 else "no time left"
        if limit > 0:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            with contextlib.suppress(subprocess.TimeoutExpired), ended(process):
                code = process.wait(limit)
    tail = (out / f"{name}.log").read_text(errors="replace").splitlines()[-5:]
    return {"step": name, "code": code, "seconds": round(time.monotonic() - start, 1), "tail": tail}


@contextlib.contextmanager
def ended(process: subprocess.Popen):
    """With all processes that it started, which would share the GPU with what is timed next."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def machine() -> dict:
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "processors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "copy_bytes_per_second": copy_speed(),
    }


def copy_speed() -> float:
    """Bytes read plus written by a plain copy: the limit of what reads its inputs once and writes its outputs once."""
    source = torch.empty(1 << 28, device="cuda")
    target = torch.empty_like(source)
    seconds = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * source.nbytes / min(seconds)


def versions() -> dict[str, str]:
    installed = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
    return {"python": sys.version.split()[0]} | {p: installed[p.lower()] for p in PACKAGES if p.lower() in installed}


def read(path: Path):
    return json.loads(path.read_text()) if path.exists() else None


def outcome(code) -> str:
    return "went well" if code == 0 else code if isinstance(code, str) else f"FAILED with {code}"


def main(out: Path) -> int:
    if reason := CupyLaunch().why_not(torch.device("cuda")):
        print("gpu_check" + reason.removeprefix("backend='cuda'"), file=sys.stderr)
        return 3
    report = {"machine": machine(), "versions": versions(), "steps": []}
    skipped = NEEDS_FAIRSEQ if lacks("fairseq") else ()
    if skipped:
        print(f"fairseq is not installed, so these steps are skipped: {', '.join(skipped)}", flush=True)
    report["skipped"] = list(skipped)
    for name in FIGURES:  # of an earlier run
        (out / f"{name}.json").unlink(missing_ok=True)
    end = time.monotonic() + TOTAL
    for name, limit, command in steps(out):
        if name in skipped:
            continue
        limit = min(limit, int(end - time.monotonic()))
        print(f"== {name}, at most {max(limit, 0)} s", flush=True)
        step = run(name, limit, command, out)
        report["steps"].append(step)
        report |= {name: read(out / f"{name}.json") for name in FIGURES}
        (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        print("\n".join([*step["tail"], f"{name}: {outcome(step['code'])}, {step['seconds']} s"]), flush=True)
    failed = [step["step"] for step in report["steps"] if step["code"] != 0]
    print(f"{out / 'report.json'}: " + (f"FAILED: {', '.join(failed)}" if failed else "every step went well"))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
