"""Fixtures of more than one folder of tests, and how the tests are divided among processes."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hostcuda import EmulatorLaunch
from support import pretrained as pretraining
from support import streams
from support.emulated import emulated
from support.shared import shared_folder


@pytest.fixture(scope="module")
def one_thread():
    """For tensors this small more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
