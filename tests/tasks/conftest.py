"""Fixtures of the command-line tests."""

from __future__ import annotations

import pytest
from support import lm_data as sentences
from support.shared import shared_folder


@pytest.fixture(scope="session")
def lm_data(tmp_path_factory):
    """A binarised text of short English sentences."""
    return shared_folder(tmp_path_factory, "lm_data", sentences.binarise) / "bin"
