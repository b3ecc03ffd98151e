"""Folders that tests of several files, in several worker processes, read and none of them changes."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def shared_folder(factory: pytest.TempPathFactory, name: str, fill: Callable[[Path], object]) -> Path:
    """A folder of this test run that ``fill`` has filled: the first worker that asks for it calls ``fill``, the others wait."""
    run = factory.getbasetemp()
    run = run.parent if "PYTEST_XDIST_WORKER" in os.environ else run
    folder, filled = run / name, run / f"{name}.filled"
    with (run / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not filled.exists():
            shutil.rmtree(folder, ignore_errors=True)  # a worker that failed has left it
            folder.mkdir()
            fill(folder)
            filled.touch()
    return folder
