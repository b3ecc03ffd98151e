"""Tensors of the kernels' tests start as NaN where nothing has been written."""

from __future__ import annotations

import pytest
import torch
from hostcuda import unwritten_is_nan


@pytest.fixture(autouse=True)
def unwritten():
    """Not on a device, whose libraries would warn of it."""
    if torch.cuda.is_available():
        yield
        return
    with unwritten_is_nan():
        yield
