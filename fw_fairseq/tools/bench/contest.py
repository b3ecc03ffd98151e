"""What the parts of fw-bench share: clocks, the machine, progress.

Contenders take turns within each round, so that a drifting machine touches all of them alike; what is reported is the median
time, and the median over rounds of the ratio of two contenders in the same round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
import time
from pathlib import Path

import torch


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def repeated(call, args) -> float:
    for _ in range(10):
        call()
    return 1e6 * statistics.median(timed(call, args.device) for _ in range(20 * args.rounds))


def timed(call, device: str) -> float:
    """Seconds; with one thread on a CPU those that it ran, without those that others on the machine took from it."""
    clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    synchronise(device)
    start = clock()
    call()
    synchronise(device)
    return clock() - start


def synchronise(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def machine(args) -> dict:
    name = torch.cuda.get_device_name() if args.device != "cpu" else processor()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"device": name, "threads": args.threads, "system": platform.system(), **versions}


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def process_memory(field: str) -> int:
    """Bytes that this process has (VmRSS) or had at most (VmHWM) in memory; the latter for both where it is not Linux."""
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) * 1024


def write_json(path: Path, report: dict) -> None:
    """Whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(part, path)
