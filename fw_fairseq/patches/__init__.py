"""Changes to fairseq 0.12: repairs for today's torch and NumPy, and for its own faults. ``fw_fairseq.models`` applies them once."""

from __future__ import annotations

from . import batches, distributed, literals, non_finite, option_values, stopping, texts, training  # noqa: F401  each adds its changes
from .checkpoints import origin, plateau, reading, resuming, writing  # noqa: F401
from .replacing import CHANGES

__all__ = ["CHANGES", "apply"]


def apply() -> None:
    for change in CHANGES:
        change.apply()
