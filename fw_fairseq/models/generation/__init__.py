"""Generation token by token: what a step needs is prepared once, and a step does the arithmetic alone."""

from __future__ import annotations

from typing import Any

from .captured import CapturedGeneration
from .generation import GENERATION, Generation, generation_in

__all__ = ["GENERATION", "Generation", "generation_in", "start"]


def start(decoder: Any, incremental_state: dict, encoder_out: dict | None) -> Generation | bool:
    """Returns what reads the tokens of a generation; False where the decoder has parts that it does not know."""
    if not Generation.fits(decoder):
        return False
    kind = CapturedGeneration if CapturedGeneration.fits(decoder) else Generation
    return kind(decoder, incremental_state, encoder_out)
