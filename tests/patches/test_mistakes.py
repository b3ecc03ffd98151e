"""What is shown as a sentence, and what keeps its traceback. The tests of the commands show that they do so."""

from __future__ import annotations

import sys
import traceback

import pytest
import torch
from fairseq.data import Dictionary
from torch.multiprocessing import ProcessRaisedException

import fw_fairseq.models  # noqa: F401
from fw_fairseq.data.streams import StreamDataset
from fw_fairseq.data.text import Text
from fw_fairseq.ops import fast_weight
from fw_fairseq.patches.mistakes import sentence, shortened


def unknown_rule():
    fast_weight(*torch.ones(3, 1, 1, 1, 1), rule="hebb")


def no_dictionary():
    Dictionary.load("nowhere/dict.txt")


def fault_of_this_project():
    StreamDataset(Text(None, "train"), 1, 1, 1, 2)


def fault_elsewhere():
    int("one")


def raised(call) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    pytest.fail("nothing was raised")


def in_a_worker(error: BaseException) -> ProcessRaisedException:
    """As ``torch.multiprocessing.spawn`` reports it."""
    text = "".join(traceback.format_exception(error))
    return ProcessRaisedException(f"\n\n-- Process 1 terminated with the following error:\n{text}", 1, 77)


@pytest.mark.parametrize(
    "call, start",
    [(unknown_rule, "rule is 'hebb'"), (no_dictionary, "[Errno 2]"), (fault_of_this_project, None), (fault_elsewhere, None)],
)
@pytest.mark.parametrize("where", [lambda error: error, in_a_worker], ids=["here", "worker"])
def test_only_mistakes_are_sentences(call, start, where):
    said = sentence(where(raised(call)))
    assert said == start or (said.startswith(start) and "\n" not in said)


def test_the_traceback_can_be_asked_for(monkeypatch, capsys):
    show, error = shortened(sys.__excepthook__), raised(unknown_rule)
    monkeypatch.setattr(sys, "argv", ["/bin/fairseq-train"])
    show(type(error), error, error.__traceback__)
    assert capsys.readouterr().err == f"fairseq-train: {error}\n"
    monkeypatch.setenv("FW_TRACEBACK", "1")
    show(type(error), error, error.__traceback__)
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback") and shown.endswith(f"ValueError: {error}\n")
