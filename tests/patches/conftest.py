"""Fixtures of the tests of changes to fairseq."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def languages(dictionary, tmp_path_factory):
    """A data folder with nothing but the dictionaries of two languages, a and b."""
    folder = tmp_path_factory.mktemp("languages")
    for language in "ab":
        (folder / f"dict.{language}.txt").write_text((dictionary / "dict.txt").read_text())
    return folder
