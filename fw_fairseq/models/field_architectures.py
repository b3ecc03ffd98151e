"""Architectures of fast_weight_lm with the layers of published recurrences: rule, features, and the parts around the recurrence.

The models have the parameters of their authors', with embeddings that input and output share. Each option can be given beside
``--arch``, so that a model can be had without one of its parts.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields
from typing import Any

from fairseq.models import register_model_architecture
from fairseq.models.transformer_lm import base_lm_architecture
from fairseq.utils import safe_getattr

from ..mixers.parts.features import NEEDED
from .fast_weight_lm import FastWeightLanguageModelConfig  # which registers the model of these architectures
from .lm_architectures import choose_mixer, defaults

DEFAULTS = {f.name: f.default for f in fields(FastWeightLanguageModelConfig)}


def since(args: Namespace, **options) -> dict:
    """The options that an architecture has got since it was first published here; for a checkpoint of before, their defaults. Such
    a checkpoint lacks them, but has a ``_name`` and the other options of its architecture, which a command line does not have."""
    before = safe_getattr(args, "_name") is not None and safe_getattr(args, "bias_free") is not None
    return {name: DEFAULTS[name] for name in options} if before else options


def published(args: Namespace, rule: str, layers: int, width: int, heads: int, **options) -> None:
    """Sets sizes and options; every published layer here has an output norm and no biases. Positions come from the recurrence."""
    options = {"feature_map": "identity", "feature_norm": "none", "bias_free": True, "output_norm": True} | options
    choose_mixer(args, "fast_weight", update_rule=rule, **without_missing_parts(args, options))
    sizes(args, layers, width, heads)


def sizes(args: Namespace, layers: int, width: int, heads: int) -> None:
    """Sets sizes, and a model without positions whose embeddings are shared."""
    defaults(args, decoder_layers=layers, decoder_embed_dim=width, decoder_attention_heads=heads, activation_fn="gelu")
    defaults(args, no_token_positional_embeddings=True, share_decoder_input_output_embed=True, no_scale_embedding=True)
    base_lm_architecture(args)


def with_swiglu(args: Namespace, width: int, ratio: int = 4) -> dict:
    """RMS norms, and SwiGLU with about as many parameters as ``ratio`` square matrices of this width, unless another is given.
    Returns the option of the mixer that goes with them."""
    units = 2 * ratio * safe_getattr(args, "decoder_embed_dim", width) // 3
    defaults(args, decoder_ffn_embed_dim=256 * -(-units // 256))
    form = "swiglu" if args.decoder_ffn_embed_dim and not safe_getattr(args, "ffn_sparsity") else "plain"
    defaults(args, **since(args, norm_form="rms", norm_eps=1e-6, ffn_form=form))
    return since(args, output_norm_eps=1e-6)


def with_channel_mixing(args: Namespace, width: int, ratio: float, form: str) -> None:
    """RWKV's feed-forward layers, and its norm of the embeddings."""
    units = int(ratio * safe_getattr(args, "decoder_embed_dim", width))
    defaults(args, decoder_ffn_embed_dim=32 * -(-units // 32), layernorm_embedding=True)
    form = form if args.decoder_ffn_embed_dim and not safe_getattr(args, "ffn_sparsity") else "plain"
    defaults(args, **since(args, ffn_form=form))


def without_missing_parts(args: Namespace, options: dict) -> dict:
    """The options without those of parts that were turned off."""
    on = {name: safe_getattr(args, name, value) for name, value in options.items()}
    return {name: value for name, value in options.items() if all(on.get(part, True) for part in NEEDED.get(name, ()))}


def with_unit_keys(args: Namespace, rule: str, layers: int = 24, width: int = 1024, heads: int = 8, **options) -> None:
    """Sets a layer with a short convolution, queries and keys of length 1, and an output gate, for a rule that erases."""
    parts: dict[str, Any] = {"feature_norm": "l2_eps", "short_conv": 4, "output_gate": True, "scale_reads": True}
    parts |= with_swiglu(args, width) | options
    published(args, rule, layers, width, heads, **parts)


def width_of_head(args: Namespace, width: int, heads: int) -> int:
    """That of a model with these sizes, unless others were given."""
    return safe_getattr(args, "decoder_embed_dim", width) // safe_getattr(args, "decoder_attention_heads", heads)


def of_keys(args: Namespace) -> dict:
    """Reads scaled by the width of keys, which is not that of values."""
    return {"scale_reads": True} | since(args, scale_reads_of="keys")


def kimi_gate(args: Namespace) -> dict:
    """An output gate that is a sigmoid of low rank."""
    return since(args, output_gate_form="sigmoid", output_gate_rank=width_of_head(args, 1024, 8))


@register_model_architecture("fast_weight_lm", "retnet_lm")
def retnet_lm(args: Namespace) -> None:
    """RetNet at the size of 340M parameters in which Yang et al. 2023 compare it: values twice as wide as keys."""
    parts = {"output_gate": True} | of_keys(args) | since(args, rotary=True) | since(args, expand_values=2.0)
    published(args, "retnet", 24, 1024, 4, **parts, **with_swiglu(args, 1024, ratio=2))


@register_model_architecture("fast_weight_lm", "gla_lm")
def gla_lm(args: Namespace) -> None:
    """Gated linear attention, 340M parameters: 24 layers of width 1024, 4 heads with keys of width 128."""
    parts = {"feature_dim": 128, "output_gate": True} | of_keys(args) | with_swiglu(args, 1024)
    published(args, "gla", 24, 1024, 4, **parts)


@register_model_architecture("fast_weight_lm", "mamba2_lm")
def mamba2_lm(args: Namespace) -> None:
    """Mamba 2 with 130M parameters: 24 layers of width 768, 24 heads of width 64 that share keys and queries of width 128, and no
    feed-forward layers. The norm takes all heads together, after the gate."""
    options = {"feature_dim": 128, "key_heads": 1, "short_conv": 4, "output_gate": True}
    options |= since(args, expand_values=2.0, short_conv_bias=True, output_norm_of="all_heads", norm_after_gate=True)
    defaults(args, decoder_ffn_embed_dim=0, **since(args, norm_form="rms"))
    published(args, "mamba2", 24, 768, 24, **options)


@register_model_architecture("fast_weight_lm", "hgrn2_lm")
def hgrn2_lm(args: Namespace) -> None:
    """HGRN 2 with 8 heads of 128, at the size of gla_lm: the SiLU of queries, and a norm of all heads together."""
    parts = with_swiglu(args, 1024) | {"feature_map": "silu", "output_norm_eps": 1e-5}
    parts |= since(args, output_norm_of="all_heads", scale_reads=True)
    published(args, "hgrn2", 24, 1024, 8, **parts)


@register_model_architecture("fast_weight_lm", "rwkv6_lm")
def rwkv6_lm(args: Namespace) -> None:
    """RWKV 6 in the shape of rwkv7_lm; the mixtures of its token shift have rank 32."""
    parts = {"token_shift": True, "output_gate": True} | since(args, token_shift_rank=32)
    with_channel_mixing(args, 768, 3.5, "rwkv6")
    published(args, "rwkv6", 12, 768, 12, **parts, **since(args, output_norm_of="centred_head"))


@register_model_architecture("fast_weight_lm", "rwkv7_lm")
def rwkv7_lm(args: Namespace) -> None:
    """RWKV 7 in the shape of its model of 0.1B: 12 layers of width 768, heads of 64, which mix in the first layer's values and read
    a token's own, and an output gate of rank 128."""
    rank = 0 if safe_getattr(args, "decoder_layers") == 1 else 32
    parts = {"token_shift": True, "output_gate": True} | since(args, value_mixing_rank=rank)
    parts |= since(args, output_norm_of="centred_head", output_norm_eps=1e-5 * width_of_head(args, 768, 12), read_own_value=True)
    parts |= since(args, output_gate_form="of_sigmoid", output_gate_rank=128, projection_init="rwkv7")
    with_channel_mixing(args, 768, 4, "rwkv7")
    published(args, "rwkv7", 12, 768, 12, **parts)


@register_model_architecture("fast_weight_lm", "kda_lm")
def kda_lm(args: Namespace) -> None:
    """Kimi Delta Attention with 8 heads of 128, at the size of gla_lm."""
    with_unit_keys(args, "kda", **kimi_gate(args))


@register_model_architecture("fast_weight_lm", "gdn2_lm")
def gdn2_lm(args: Namespace) -> None:
    """Gated DeltaNet 2 with 8 heads of 128, at the size of gla_lm."""
    with_unit_keys(args, "gdn2", **kimi_gate(args))


@register_model_architecture("fast_weight_lm", "delta_net_lm")
def delta_net_lm(args: Namespace) -> None:
    """DeltaNet of Yang et al. 2024 with 8 heads of 128, at the size of gla_lm. It has no output gate."""
    with_unit_keys(args, "delta", output_gate=False)


@register_model_architecture("fast_weight_lm", "gated_delta_lm")
def gated_delta_lm(args: Namespace) -> None:
    """Gated DeltaNet at the size of gla_lm: 21 layers of width 1024, 4 heads, whose keys together are three quarters as wide as the
    layer, and values twice as wide as keys."""
    keys = 3 * width_of_head(args, 1024, 4) // 4
    parts: dict[str, Any] = {"feature_dim": keys, "expand_values": 1.5, "exponential_decay": True}
    with_unit_keys(args, "gated_delta", layers=21, heads=4, **parts, **of_keys(args))


@register_model_architecture("fast_weight_lm", "comba_lm")
def comba_lm(args: Namespace) -> None:
    """Comba in the shape of gated_delta_lm, with a sigmoid as output gate."""
    keys = 3 * width_of_head(args, 1024, 4) // 4
    parts: dict[str, Any] = {"feature_dim": keys, "expand_values": 1.5, "output_gate_form": "sigmoid"}
    with_unit_keys(args, "comba", layers=21, heads=4, **parts, **of_keys(args))


@register_model_architecture("fast_weight_lm", "gsa_lm")
def gsa_lm(args: Namespace) -> None:
    """Gated slot attention at the size of gla_lm: 4 heads of 256 with 64 slots."""
    choose_mixer(args, "gsa", slots=64, **with_swiglu(args, 1024))
    sizes(args, 24, 1024, 4)


@register_model_architecture("fast_weight_lm", "delta_product_lm")
def delta_product_lm(args: Namespace) -> None:
    """DeltaProduct with two writes for each token and negative eigenvalues, at the size of gla_lm."""
    with_unit_keys(args, "delta_product", negative_eigenvalues=True)


@register_model_architecture("fast_weight_lm", "gated_delta_product_lm")
def gated_delta_product_lm(args: Namespace) -> None:
    """Gated DeltaProduct: delta_product_lm with a gate that decays the memory before the first write of a token."""
    with_unit_keys(args, "gated_delta_product", negative_eigenvalues=True)
