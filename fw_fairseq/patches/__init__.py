"""Changes to fairseq 0.12: repairs for today's torch and NumPy, and for its own faults. ``fw_fairseq.models`` applies them once."""

from __future__ import annotations

from . import (  # noqa: F401  each adds its changes
    batches,
    literals,
    non_finite,
    options,
    progress,
    stopping,
    training,
    workers,
)
from .checkpoints import origin, reading, saving  # noqa: F401
from .replacing import CHANGES
from .speed import adaptive, attention, optimiser  # noqa: F401

__all__ = ["CHANGES", "apply"]


def apply() -> None:
    """Makes all changes that are not made yet."""
    for change in CHANGES:
        change.apply()
