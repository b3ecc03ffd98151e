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


@pytest.fixture(scope="module")
def checked_here():
    """Exported folders are checked in this process: another one needs seconds to start."""
    pytest.importorskip("transformers")
    from fw_fairseq.tools.export_hf import alone, export

    def check(folder, named):
        assert alone.difference(alone.load(folder)) <= export.TOLERANCE

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "check_alone", check)
        yield
