"""Recipes as a user runs them, at toy size."""

from __future__ import annotations

import importlib.util
import subprocess
from types import ModuleType

from . import programs
from .commands import ENVIRONMENT, ROOT


def recipe(name: str, out, *args, cwd=None, **environment):
    variables = ENVIRONMENT | {"OUT": str(out), "BIN": programs.folder(), "TOY": "1", "WORKERS": "1"} | environment
    command = ["bash", str(ROOT / "recipes" / name), *map(str, args)]
    return subprocess.run(command, env=variables, cwd=cwd, capture_output=True, text=True, timeout=600)


def load(name: str) -> ModuleType:
    """Imports a Python file of a recipe, which is in no package."""
    spec = importlib.util.spec_from_file_location(name.removesuffix(".py").replace("/", "_"), ROOT / "recipes" / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
