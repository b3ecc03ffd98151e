"""The way of a call through the package stays short: no more stops and files than these (see ``walks``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LIMITS = {"layer to kernel": (30, 14), "layer to chunk": (35, 15), "command line to model": (130, 25)}


@pytest.fixture(scope="module")
def printed() -> str:
    """What the script prints, in a process that has imported nothing else."""
    script = str(Path(__file__).with_name("walks.py"))
    return subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize("name", LIMITS)
def test_no_walk_is_longer(printed, name):
    [line] = [line for line in printed.splitlines() if line.startswith(f"{name}: ")]
    _, stops, files = (int(word) for word in line.split() if word.isdecimal())
    assert (stops <= LIMITS[name][0], files <= LIMITS[name][1]) == (True, True), line
