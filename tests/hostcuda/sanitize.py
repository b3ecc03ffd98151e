"""Runs functions of the tests in a process under a sanitizer, which must be loaded before Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
LIBRARIES = {"thread": "libtsan.so", "address": "libasan.so"}
OPTIONS = {"TSAN_OPTIONS": "exitcode=66:halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0:use_sigaltstack=0"}


def run_sanitized(kind: str, *calls: str) -> None:
    """Makes the calls, such as "test_cuda_delta.sanitized(64, 64)" of a file in tests/kernels, one after the other in one process,
    most of whose time is the import of torch. AssertionError with the report if one of them is not clean. Each call draws what it
    draws in every process, since torch's own seed is another one in each; and what it does not write is NaN.

    kind: "thread" finds races between the threads of a block, "address" accesses outside tensors and fixed arrays, misaligned ones
    too. The launcher that a function makes with ``sanitized_launch()`` compiles for it.
    """
    preload = subprocess.run(["gcc", f"-print-file-name={LIBRARIES[kind]}"], capture_output=True, text=True, check=True).stdout
    lines = [f"import sys, torch; sys.path[:0] = [{str(TESTS)!r}, {str(TESTS / 'kernels')!r}]"]
    lines.append("from hostcuda import unwritten_is_nan\nwith unwritten_is_nan():")
    for call in calls:
        module = call.partition(".")[0]
        lines.append(f"    print({call!r}, flush=True); import {module}; torch.manual_seed(0); {call}")
    code = "\n".join([*lines, "print('clean')"])
    env = os.environ | OPTIONS | {"LD_PRELOAD": preload.strip(), "HOSTCUDA_SANITIZER": kind, "OMP_NUM_THREADS": "1"}
    command = ["setarch", "-R", sys.executable, "-c", code]  # without it the sanitizer's shadow may not fit
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0 and done.stdout.endswith("clean\n"), (done.stdout + done.stderr)[:4000]


def sanitized_launch(**options):
    """The emulator, compiled for the sanitizer of this process."""
    from .emulator import EmulatorLaunch

    return EmulatorLaunch(sanitizer=os.environ["HOSTCUDA_SANITIZER"], **options)
