"""The norms and feed-forward layers that published recurrent models have in place of a Transformer's."""

from __future__ import annotations

from itertools import product
from typing import Any

from torch import nn

from ..config import LanguageModelConfig

FAIRSEQ_NORM = ("layer", 1e-5)  # the form and the eps of fairseq's norms


def choose_norms(decoder: Any, config: LanguageModelConfig) -> None:
    """Gives the norms of a language model's decoder and of its layers the form and the eps of its options."""
    own = [(decoder, "layer_norm"), (decoder, "layernorm_embedding")]
    for owner, name in [*own, *product(decoder.layers, ("self_attn_layer_norm", "final_layer_norm"))]:
        norm: Any = getattr(owner, name)
        if norm is None or isinstance(norm, nn.Identity):
            continue
        if str(config.norm_form) == "rms":
            setattr(owner, name, nn.RMSNorm(norm.normalized_shape, config.norm_eps))
        else:
            norm.eps = config.norm_eps
