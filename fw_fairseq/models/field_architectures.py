"""Architectures of fast_weight_lm with the layers of published recurrences: rule, features, and the parts around the recurrence.

Their feed-forward layers are fairseq's, and the width of values is that of the layer. Each option can be given beside ``--arch``,
so that a layer can be had without one of its parts.
"""

from __future__ import annotations

from argparse import Namespace

from fairseq.models import register_model_architecture
from fairseq.models.transformer_lm import base_lm_architecture
from fairseq.utils import safe_getattr

from ..mixers.options import DECLARED
from . import fast_weight_lm  # noqa: F401  registers the model of these architectures
from .lm_architectures import choose_mixer, defaults


def since(args: Namespace, **options) -> dict:
    """The options that an architecture has got since it was first published here; for a checkpoint of before, their defaults. Such
    a checkpoint lacks them, but has a ``_name`` and the other options of its architecture, which a command line does not have."""
    before = safe_getattr(args, "_name") is not None and safe_getattr(args, "bias_free") is not None
    return {name: DECLARED[name].default for name in options} if before else options


def published(args: Namespace, rule: str, layers: int, width: int, heads: int, ffn: int | None = None, **options) -> None:
    """Sets sizes and options; every published layer here has an output norm and no biases. Positions come from the recurrence."""
    choose_mixer(args, "fast_weight", update_rule=rule, feature_map="identity", bias_free=True, output_norm=True, **options)
    defaults(args, decoder_layers=layers, decoder_embed_dim=width, decoder_attention_heads=heads)
    defaults(args, decoder_ffn_embed_dim=4 * width if ffn is None else ffn, activation_fn="gelu")
    defaults(args, no_token_positional_embeddings=True, share_decoder_input_output_embed=True)
    base_lm_architecture(args)


def with_unit_keys(args: Namespace, rule: str, layers: int = 24, width: int = 1024, heads: int = 8, **options) -> None:
    """Sets a layer with a short convolution, an output gate, and queries and keys of length 1, for a rule that erases."""
    published(args, rule, layers, width, heads, feature_norm="l2", short_conv=4, output_gate=True, scale_reads=True, **options)


@register_model_architecture("fast_weight_lm", "retnet_lm")
def retnet_lm(args: Namespace) -> None:
    """RetNet at the size of 340M parameters in which Yang et al. 2023 compare it."""
    parts = {"output_gate": True, "scale_reads": True} | since(args, rotary=True)
    published(args, "retnet", 24, 1024, 4, feature_norm="none", **parts)


@register_model_architecture("fast_weight_lm", "gla_lm")
def gla_lm(args: Namespace) -> None:
    """Gated linear attention, 340M parameters: 24 layers of width 1024, 4 heads with keys of width 128."""
    published(args, "gla", 24, 1024, 4, feature_norm="none", feature_dim=128, output_gate=True, scale_reads=True)


@register_model_architecture("fast_weight_lm", "mamba2_lm")
def mamba2_lm(args: Namespace) -> None:
    """The shape of Mamba 2 with 130M parameters: 24 layers of width 768, heads of width 64 that share keys and queries of width
    128, and no feed-forward layers. Its heads together are as wide as the layer, where Mamba's are twice as wide."""
    options = {"feature_dim": 128, "key_heads": 1, "short_conv": 4, "output_gate": True}
    published(args, "mamba2", 24, 768, 12, ffn=0, feature_norm="none", **options)


@register_model_architecture("fast_weight_lm", "hgrn2_lm")
def hgrn2_lm(args: Namespace) -> None:
    """HGRN 2 with 8 heads of 128, at the size of gla_lm."""
    published(args, "hgrn2", 24, 1024, 8, feature_norm="none")


@register_model_architecture("fast_weight_lm", "rwkv6_lm")
def rwkv6_lm(args: Namespace) -> None:
    """RWKV 6 in the shape of rwkv7_lm; the mixtures of its token shift have rank 32."""
    parts = {"token_shift": True, "output_gate": True} | since(args, token_shift_rank=32)
    published(args, "rwkv6", 12, 768, 12, feature_norm="none", **parts)


@register_model_architecture("fast_weight_lm", "rwkv7_lm")
def rwkv7_lm(args: Namespace) -> None:
    """RWKV 7 in the shape of its model of 0.1B: 12 layers of width 768, heads of 64, which mix in the first layer's values."""
    rank = 0 if safe_getattr(args, "decoder_layers") == 1 else 32
    parts = {"token_shift": True, "output_gate": True} | since(args, value_mixing_rank=rank)
    published(args, "rwkv7", 12, 768, 12, feature_norm="none", **parts)


@register_model_architecture("fast_weight_lm", "kda_lm")
def kda_lm(args: Namespace) -> None:
    """Kimi Delta Attention with 8 heads of 128, at the size of gla_lm."""
    with_unit_keys(args, "kda")


@register_model_architecture("fast_weight_lm", "gdn2_lm")
def gdn2_lm(args: Namespace) -> None:
    """Gated DeltaNet 2 with 8 heads of 128, at the size of gla_lm."""
    with_unit_keys(args, "gdn2")


@register_model_architecture("fast_weight_lm", "delta_product_lm")
def delta_product_lm(args: Namespace) -> None:
    """DeltaProduct with two writes for each token and negative eigenvalues, at the size of gla_lm."""
    with_unit_keys(args, "delta_product", negative_eigenvalues=True)
