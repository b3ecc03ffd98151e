"""Mistakes of the user are shown as sentences, and faults of the program with their tracebacks."""

from __future__ import annotations

import ast
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from torch.multiprocessing import ProcessRaisedException

import fw_fairseq.models
from fw_fairseq import Mistake
from fw_fairseq.data.streams import StreamDataset
from fw_fairseq.data.text import Text
from fw_fairseq.files import write_atomically
from fw_fairseq.ops import fast_weight
from fw_fairseq.patches import mistakes
from fw_fairseq.patches.literals import read_literal
from fw_fairseq.patches.mistakes import sentence, shortened

pytestmark = pytest.mark.quick


def unknown_rule():
    fast_weight(*torch.ones(3, 1, 1, 1, 1), rule="hebb")


def no_dictionary():
    Dictionary.load("nowhere/dict.txt")


def fault_of_this_project():
    StreamDataset(Text(None, "train"), 1, 1, 1, 2)


def fault_elsewhere():
    int("one")


def checkpoint_of_another_kind():
    read_literal("print(1)")


def option_of_fairseq():
    raise Exception("Please use --ddp-backend=legacy_ddp")


def option_that_is_asserted():
    raise AssertionError("Must specify batch size either with --max-tokens or --batch-size")


def no_network():
    raise ConnectionRefusedError(111, "Connection refused")


def fault_in_a_call_of_this_project():
    """A ValueError that passes through this project, but is not its own."""
    write_atomically(Path("a"), lambda path: int("one"))


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
    [
        (unknown_rule, "rule is 'hebb'"),
        (no_dictionary, "[Errno 2]"),
        (checkpoint_of_another_kind, "an option is 'print(1)'"),
        (option_of_fairseq, "Please use --ddp-backend=legacy_ddp"),
        (option_that_is_asserted, "Must specify batch size either with --max-tokens or --batch-size"),
        (fault_of_this_project, None),
        (fault_elsewhere, None),
        (fault_in_a_call_of_this_project, None),
        (no_network, None),
    ],
)
@pytest.mark.parametrize("where", [lambda error: error, in_a_worker], ids=["here", "worker"])
def test_only_mistakes_are_sentences(call, start, where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = sentence(where(raised(call)))
    assert said == start or (said.startswith(start) and "\n" not in said)


@pytest.mark.parametrize("where", [lambda error: error, in_a_worker], ids=["here", "worker"])
def test_an_option_that_fairseq_names_is_a_sentence(where):
    """Its assertions and ValueErrors that begin with one; others are faults of the program."""
    assert sentence(where(AssertionError("--sampling requires --nbest to be equal to --beam"))).startswith("--sampling requires")
    assert sentence(where(ValueError("--share-all-embeddings requires a joined dictionary"))).startswith("--share-all")
    assert sentence(where(AssertionError("lengths differ"))) is None and sentence(where(RuntimeError("--lr"))) is None


def test_a_sentence_needs_no_source(monkeypatch):
    """The kind of the exception decides, not the place or the text of the statement that raised it."""
    error = Mistake("--rule is 'hebb'")
    assert sentence(error) == str(error) and sentence(ValueError("never raised")) is None
    text = "Traceback (most recent call last):\nfw_fairseq.Mistake: --rule is 'hebb'"
    assert sentence(ProcessRaisedException(text, 1, 77)) == str(error)
    assert sentence(ProcessRaisedException(text.replace("Mistake", "Unknown"), 1, 77)) is None


def test_the_traceback_can_be_asked_for(monkeypatch, capsys):
    show, error = shortened(sys.__excepthook__), raised(unknown_rule)
    monkeypatch.setattr(sys, "argv", ["/bin/fairseq-train"])
    show(type(error), error, error.__traceback__)
    assert capsys.readouterr().err == f"fairseq-train: {error}\n"
    monkeypatch.setenv("FW_TRACEBACK", "1")
    show(type(error), error, error.__traceback__)
    shown = capsys.readouterr().err
    assert (shown.startswith("Traceback") and shown.rstrip().endswith(f"Error: {error}")) or shown.rstrip().endswith(
        f"Mistake: {error}"
    )


@pytest.mark.parametrize("first", ["etype", "exc"])
def test_hydra_of_any_version_shows_a_sentence(first, monkeypatch, capsys):
    """Its first version calls the function of Python 3.9 and before, by the name that its first argument had."""
    monkeypatch.setattr(sys, "argv", ["/bin/fairseq-hydra-train"])
    monkeypatch.setattr(mistakes.hydra_utils, "traceback", SimpleNamespace(print_exception=shortened(traceback.print_exception)))
    error = raised(unknown_rule)
    if first == "etype":
        mistakes.print_for_hydra(etype=None, value=error, tb=error.__traceback__)
    else:
        mistakes.hydra_utils.traceback.print_exception(None, error, error.__traceback__)
    assert capsys.readouterr().err == f"fairseq-hydra-train: {error}\n"


def test_no_plain_value_error_is_raised():
    """What the user did wrong is a Mistake; a fault of the program is another exception."""
    files = sorted(Path(fw_fairseq.__file__).parent.rglob("*.py"))
    statements = [(file, node) for file in files for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Raise)]
    raised = [(file.name, node.lineno) for file, node in statements if "ValueError" in ast.unparse(node)]
    assert len(statements) > 100 and raised == []


@pytest.mark.parametrize("command", [True, False])
def test_only_fairseqs_commands_show_errors_in_this_way(command, monkeypatch):
    """A program that imports the package keeps its own; a second call changes nothing more."""
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    for name in ("traceback", "print_exception"):
        monkeypatch.setattr(mistakes.hydra_utils, name, getattr(traceback, name, traceback), raising=False)
    monkeypatch.setitem(sys.modules, "fairseq_cli", sys)
    if not command:
        monkeypatch.delitem(sys.modules, "fairseq_cli")
    before = sys.excepthook
    mistakes.shorten()
    assert hasattr(sys.excepthook, "shortened") == hasattr(mistakes.hydra_utils.traceback.print_exception, "shortened") == command
    assert command or sys.excepthook is before
    once = sys.excepthook
    mistakes.shorten()
    assert sys.excepthook is once
