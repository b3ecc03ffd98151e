"""This project's models for Hugging Face transformers, without fairseq. ``fw-export-hf`` writes their weights."""

from .configuration import FastWeightHFConfig, FastWeightTranslationConfig
from .layers import ACTIVATIONS, Cache
from .modeling import FastWeightForCausalLM
from .saved import Prefixes, load_cache, save_cache
from .translation import FastWeightForTranslation

__all__ = [
    "ACTIVATIONS",
    "Cache",
    "FastWeightForCausalLM",
    "FastWeightForTranslation",
    "FastWeightHFConfig",
    "FastWeightTranslationConfig",
    "Prefixes",
    "load_cache",
    "save_cache",
]
