"""The parts of fairseq that fw-bench uses. They take seconds to import, and fw-bench ops does not need them."""

# ruff: noqa: E402
import logging

logging.basicConfig(level=logging.WARNING)  # before fairseq's import, which else makes every library log what it does

from fairseq.data import Dictionary
from fairseq.models.transformer_lm import TransformerLanguageModel, base_lm_architecture

from ...models.fast_weight_lm import FastWeightLanguageModel

__all__ = ["Dictionary", "FastWeightLanguageModel", "TransformerLanguageModel", "base_lm_architecture"]
