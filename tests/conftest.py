"""Shared inputs. Everything iterates over the registries, so a new rule or feature map is tested by being there."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hostcuda import EmulatorLaunch
from support.emulated import emulated


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
