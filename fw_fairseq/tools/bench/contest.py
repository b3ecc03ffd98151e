"""The parts that every fw-bench command shares: rounds, clocks, memory, the machine and progress.

Contenders take turns within each round, so that a machine that becomes slower or faster affects all of them equally. Reports have
the median time, and the median over rounds of the ratio of two contenders in the same round.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ...files import write_atomically


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def take_turns(contenders: dict, rounds: int, what: str = "", untimed: int = 1) -> dict[object, list]:
    """Calls every contender once in each round. Returns by name the results of all rounds but the first ``untimed`` ones."""
    found: dict[object, list] = {name: [] for name in contenders}
    for number in range(1 - untimed, rounds + 1):
        for name, call in contenders.items():
            result = call()
            if number > 0:
                found[name].append(result)
        progress(f"{what}{', ' * bool(what)}round {max(number, 0)} of {rounds}")
    return found


def spread(seconds: list[float]) -> dict[str, float]:
    return {"seconds": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def times_faster(peer: list[float], own: list[float]) -> float:
    """The median over rounds of the ratio of two times."""
    return statistics.median(p / o for p, o in zip(peer, own))


def repeated(call: Callable[[], object], args) -> float:
    """Returns the median of many calls, in microseconds."""
    for _ in range(10):
        call()
    return 1e6 * statistics.median(timed(call, args.device) for _ in range(20 * args.rounds))


def timed(call: Callable[[], object], device: str) -> float:
    """Returns the seconds of one call; with one thread on a CPU the seconds that this process ran, without those of other
    processes."""
    clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    synchronise(device)
    start = clock()
    call()
    synchronise(device)
    return clock() - start


def synchronise(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def settings(args) -> dict:
    """Returns the options of the command, for the report."""
    return {name: value for name, value in vars(args).items() if isinstance(value, (int, str, list)) and name != "resume"}


def parameter_counts(models: dict[str, torch.nn.Module]) -> list[dict]:
    return [{"name": name, "parameters": sum(x.numel() for x in model.parameters())} for name, model in models.items()]


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
    write_atomically(path, lambda part: part.write_text(json.dumps(report, indent=1) + "\n"))
