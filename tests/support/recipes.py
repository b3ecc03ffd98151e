"""Recipes as a user runs them, at toy size."""

from __future__ import annotations

import subprocess

from . import programs
from .commands import ENVIRONMENT, ROOT


def recipe(name: str, out, *args, cwd=None, **environment):
    variables = ENVIRONMENT | {"OUT": str(out), "BIN": programs.folder(), "TOY": "1", "WORKERS": "1"} | environment
    command = ["bash", str(ROOT / "recipes" / name), *map(str, args)]
    return subprocess.run(command, env=variables, cwd=cwd, capture_output=True, text=True, timeout=600)
