"""Runs the steps of recipes/gpu_check.sh one after the other and writes one report."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from fw_fairseq.ops.cuda_launch import CupyLaunch

HERE = Path(__file__).parent
PACKAGES = ("torch", "numpy", "cupy-cuda13x", "cupy-cuda12x", "triton", "flash-linear-attention", "fw_fairseq")
SANITIZER_TOOLS = ("memcheck", "racecheck")
FIGURES = ("ops", "model", "mixers")


def steps(out: Path) -> list[tuple[str, int, list[str]]]:
    """(name, seconds that it may take, command). Together under 9 minutes."""
    device = ["--device", "cuda", "--rounds", "5"]
    python = [sys.executable, "-m"]
    sanitizer = shutil.which("compute-sanitizer")
    kernels = [sys.executable, str(HERE / "kernels.py")]
    ops = ["ops", *device, "--dtype", "bfloat16", "--tokens", "512", "2048", "8192", "--batch", "8", "--cumsum-up-to", "512"]
    ops += ["--feature-map", "dpfp"]
    model = ["model", *device, "--mixers", "delta", "decay", "--tokens", "512", "2048", "--contexts", "256", "4096"]
    model += ["--hypotheses", "8"]
    mixers = ["mixers", *device, "--width", "1024", "--heads", "16", "--length", "512", "--tokens", "8192"]
    outputs = {name: ["--json", str(out / f"{name}.json"), "--figure", str(out / f"{name}.svg")] for name in FIGURES}
    return [
        ("tests", 140, [*python, "pytest", "-m", "gpu", "-rs", "tests"]),
        ("kernels", 40, kernels),
        *((tool, 60, [sanitizer, "--tool", tool, "--error-exitcode", "9", *kernels]) for tool in SANITIZER_TOOLS if sanitizer),
        ("ops", 120, [*python, "fw_fairseq.bench", *ops, *outputs["ops"]]),
        ("model", 90, [*python, "fw_fairseq.bench", *model, *outputs["model"]]),
        ("mixers", 25, [*python, "fw_fairseq.bench", *mixers, *outputs["mixers"]]),
    ]


def run(name: str, limit: int, command: list[str], out: Path) -> dict:
    start = time.monotonic()
    with (out / f"{name}.log").open("w") as log:
        try:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            code = f"stopped after {limit} s"
    tail = (out / f"{name}.log").read_text().splitlines()[-5:]
    return {"step": name, "code": code, "seconds": round(time.monotonic() - start, 1), "tail": tail}


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


def main(out: Path) -> int:
    if reason := CupyLaunch().why_not(torch.device("cuda")):
        print("gpu_check" + reason.removeprefix("backend='cuda'"), file=sys.stderr)
        return 3
    report = {"machine": machine(), "versions": versions(), "steps": []}
    for name, limit, command in steps(out):
        print(f"== {name}, at most {limit} s", flush=True)
        report["steps"].append(run(name, limit, command, out))
        print("\n".join(report["steps"][-1]["tail"]))
    for name in FIGURES:
        figures = out / f"{name}.json"
        report[name] = json.loads(figures.read_text()) if figures.exists() else None
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    failed = [step["step"] for step in report["steps"] if step["code"] != 0]
    print(f"{out / 'report.json'}: " + (f"FAILED: {', '.join(failed)}" if failed else "every step went well"))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
