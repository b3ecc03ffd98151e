"""fast_weight_lm for Hugging Face transformers, without fairseq. ``fw-export-hf`` writes its weights."""

from .configuration import FastWeightHFConfig
from .layers import ACTIVATIONS, Cache
from .modeling import FastWeightForCausalLM

__all__ = ["ACTIVATIONS", "Cache", "FastWeightForCausalLM", "FastWeightHFConfig"]
