"""Fixtures of the tests of the tools."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A folder with a tiny GPT-2 as transformers saves it, and that model."""
    pytest.importorskip("transformers")
    from support.gpt2 import save_gpt2

    folder = tmp_path_factory.mktemp("gpt2")
    return folder, save_gpt2(folder)
