"""The parts that every benchmark shares: options, rounds, clocks, memory, the machine, progress and the report's files.

Contenders take turns within each round, so that a machine that becomes slower or faster affects all of them equally. Reports have
the median time, and the median over rounds of the ratio of two contenders in the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ...errors import Mistake
from ...files import write_atomically
from ..command import refuse_folder


def positive(text: str) -> int:
    """An option that is a number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def add_common(parser: argparse.ArgumentParser) -> None:
    """Adds the options that all benchmarks have."""
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--rounds", type=positive, default=7, help="timed rounds, after one that is not timed")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--json", type=Path, help="file to write all measurements to")


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses a device that is not there and files that cannot be written, before anything is measured."""
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {args.device} needs a CUDA device, and torch sees none; use --device cpu")
    if args.json:
        refuse_folder("--json", args.json)
        with contextlib.suppress(FileNotFoundError):
            if '"settings": {' not in args.json.read_text(errors="replace"):
                raise Mistake(f"--json is {args.json}, which is no report of fw-bench and would be lost; name another file")
    torch.set_num_threads(args.threads)


def finish(args: argparse.Namespace, report: dict, table: Callable[[dict], str]) -> None:
    """Prints the tables of a report, and writes its file."""
    progress("")
    print(table(report))
    if args.json:
        write_json(args.json, report)


def take_turns(contenders: Mapping[Any, Callable[[], Any]], rounds: int, what: str = "", untimed: int = 1) -> dict[Any, list]:
    """Calls every contender once in each round. Returns by name the results of all rounds but the first ``untimed`` ones."""
    found: dict[Any, list] = {name: [] for name in contenders}
    for number in range(1 - untimed, rounds + 1):
        for name, call in contenders.items():
            result = call()
            if number > 0:
                found[name].append(result)
        progress(f"{what}{', ' * bool(what)}round {max(number, 0)} of {rounds}")
    return found


def spread(seconds: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"seconds": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def times_faster(peer: list[float], own: list[float]) -> float:
    """The median over rounds of the ratio of two times."""
    return statistics.median(p / o for p, o in zip(peer, own))


def timed(call: Callable[[], object], device: str) -> float:
    """Returns the seconds of one call; with one thread on a CPU the seconds that this process ran, without those of other
    processes."""
    clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    if device != "cpu":
        torch.cuda.synchronize()
    start = clock()
    call()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - start


def settings(args: argparse.Namespace) -> dict:
    """Returns the options of the command, for the report."""
    return {name: value for name, value in vars(args).items() if isinstance(value, (int, str, list)) and name != "resume"}


def parameter_counts(models: dict[str, torch.nn.Module]) -> list[dict]:
    """Returns the number of parameters of each model."""
    return [{"name": name, "parameters": sum(x.numel() for x in model.parameters())} for name, model in models.items()]


def machine(args: argparse.Namespace) -> dict:
    """Returns what the report says of the machine."""
    name = torch.cuda.get_device_name() if args.device != "cpu" else _processor()
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    return {"device": name, "threads": args.threads, "system": platform.system(), **versions}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def progress(text: str) -> None:
    """Prints what is going on, on a terminal, in place of the text before."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def say(text: str) -> None:
    """Prints a line that stays, in place of the progress."""
    progress("")
    print(text, file=sys.stderr)


def peak_beyond(call: Callable[[], object], device: str) -> int:
    """Returns the bytes at the peak of ``call`` beyond those in use before it. On a CPU the process must not have used more
    before."""
    if device == "cpu":
        before = process_memory("VmRSS")
        call()
        return process_memory("VmHWM") - before
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def process_memory(field: str) -> int:
    """Returns the bytes that this process has in memory (VmRSS) or had at its peak (VmHWM); on other systems than Linux always the
    peak."""
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) * 1024


def write_json(path: Path, report: dict) -> None:
    """Writes a report."""
    write_atomically(path, lambda part: part.write_text(json.dumps(report, indent=1) + "\n"))
