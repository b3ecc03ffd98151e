"""Fixtures of more than one folder of tests, and how the tests are divided among processes."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import pytest
import torch
from hostcuda import EmulatorLaunch
from support import pretrained as pretraining
from support import streams
from support.commands import preloaded
from support.emulated import emulated
from support.shared import shared_folder


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "quick":
        config.option.markexpr = "quick and not slow"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m quick`` files without a quick test are not imported, which would take as long as the tests."""
    asked = config.option.markexpr == "quick and not slow" and collection_path.name.startswith("test_")
    return True if asked and "mark.quick" not in collection_path.read_text(encoding="utf-8") else None


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put quick files last: a process that gets a long file at the end is waited for. Of a test with ``cases_in_ci(n)`` the cases
    after the first n are long.
    """
    seen: Counter[str] = Counter()
    for item in items:
        if few := item.get_closest_marker("cases_in_ci"):
            name = item.nodeid.partition("[")[0]
            seen[name] += 1
            if seen[name] > few.args[0]:
                item.add_marker("long")
    items.sort(key=lambda item: item.get_closest_marker("quick") is not None)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the process that commands are forked from before code under test can start one: a process has only one, and fw-bench's
    has imported fw_fairseq, whose import is part of what commands test.
    """
    if not session.config.option.collectonly and not all(item.get_closest_marker("quick") for item in session.items):
        preloaded()


@pytest.fixture(scope="module")
def one_thread():
    """For tensors this small more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def in_pytorch(monkeypatch):
    """Pooling, SRU and generation as on a machine without a compiler."""
    from fw_fairseq.ops import native

    monkeypatch.setattr(native, "library", lambda: None)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def emulate(one_thread):
    """``emulate(policy, seed, ...)``: from now on kernels run on the emulator, for tensors on the CPU; returns the launcher."""
    with contextlib.ExitStack() as stack:

        def start(*schedule, **options):
            return stack.enter_context(emulated(EmulatorLaunch(*schedule, **options)))

        yield start


@pytest.fixture(scope="session")
def stream_data(tmp_path_factory):
    """A binarised text of random words, for training on streams."""
    return shared_folder(tmp_path_factory, "stream_data", streams.binarise) / "bin"


@pytest.fixture(scope="session")
def counting_data(tmp_path_factory):
    """A binarised text of words that count up, which a few updates learn."""
    return shared_folder(tmp_path_factory, "counting_data", pretraining.binarise) / "bin"


@pytest.fixture(scope="session")
def pretrained(counting_data, tmp_path_factory):
    """A checkpoint of transformer_lm after 40 updates on ``counting_data``."""
    folder = shared_folder(tmp_path_factory, "pretrained", lambda folder: pretraining.pretrain(counting_data, folder))
    return folder / "checkpoint_last.pt"


@pytest.fixture(scope="module")
def dictionary(tmp_path_factory):
    """A data folder with nothing but its dictionary, 60 words."""
    folder = tmp_path_factory.mktemp("dictionary")
    (folder / "dict.txt").write_text("".join(f"w{i} 1\n" for i in range(60)))
    return folder
