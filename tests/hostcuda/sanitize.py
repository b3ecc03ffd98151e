"""Runs a test's function in a process under a sanitizer, which must be loaded before Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
LIBRARIES = {"thread": "libtsan.so", "address": "libasan.so"}
OPTIONS = {"TSAN_OPTIONS": "exitcode=66:halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0:use_sigaltstack=0"}


def run_sanitized(kind: str, function: str, *arguments: str) -> None:
    """Calls ``function`` ("module:name" of a file in tests/) with ``arguments``; AssertionError with the report if it is not clean.

    kind: "thread" finds races between the threads of a block, "address" accesses outside tensors and fixed arrays, misaligned ones
    too. The launcher that the function makes with ``sanitized_launch()`` compiles for it.
    """
    preload = subprocess.run(["gcc", f"-print-file-name={LIBRARIES[kind]}"], capture_output=True, text=True, check=True).stdout
    module, name = function.split(":")
    code = f"import sys; sys.path.insert(0, {str(TESTS)!r}); import {module}; {module}.{name}(*sys.argv[1:]); print('clean')"
    env = os.environ | OPTIONS | {"LD_PRELOAD": preload.strip(), "HOSTCUDA_SANITIZER": kind, "OMP_NUM_THREADS": "1"}
    command = ["setarch", "-R", sys.executable, "-c", code, *arguments]  # without it the sanitizer's shadow may not fit
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.endswith("clean\n"), (done.stdout + done.stderr)[:4000]


def sanitized_launch(**options):
    """The emulator, compiled for the sanitizer of this process."""
    from .emulator import EmulatorLaunch

    return EmulatorLaunch(sanitizer=os.environ["HOSTCUDA_SANITIZER"], **options)
