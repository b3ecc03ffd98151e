"""A plugin, ``pytest -p support.without_fairseq``: skips every test, and every file, that imports fairseq or what comes with it, as
on a machine that has none."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder

import pytest

HIDDEN = {"fairseq", "fairseq_cli", "hydra", "omegaconf"}


class Hide(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            pytest.skip(f"{name} is hidden", allow_module_level=True)


def pytest_configure():
    for name in [name for name in sys.modules if name.partition(".")[0] in HIDDEN]:  # Hydra brings a plugin for pytest
        del sys.modules[name]
    sys.meta_path.insert(0, Hide())
