"""Recipes as a user runs them, at toy size."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

from . import programs
from .commands import ENVIRONMENT, ROOT
from .imports import import_file


def recipe(name: str, out, *args, cwd=None, **environment):
    variables = ENVIRONMENT | {"OUT": str(out), "BIN": programs.folder(), "TOY": "1", "WORKERS": "1"} | environment
    command = ["bash", str(ROOT / "recipes" / name), *map(str, args)]
    return subprocess.run(command, env=variables, cwd=cwd, capture_output=True, text=True, timeout=600)


def load(name: str) -> ModuleType:
    """Imports a Python file of a recipe."""
    return import_file(ROOT / "recipes" / name, name.removesuffix(".py").replace("/", "_"))


def results_script(name: str) -> ModuleType:
    """Imports a script of docs/results, which imports others of its folder."""
    path = ROOT / "docs" / "results" / name
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return import_file(path, f"results_{path.stem}")
