"""The options that models of flash-linear-attention, and Mamba 2 of transformers, have here, from their configurations."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import Mistake

Config = dict[str, Any]
SWISH = ("swish", "silu")
RANK_7 = 64  # of the decay of rwkv7
ALWAYS: dict[str, tuple] = {"attn": (None,), "attnres_block_size": (None,), "elementwise_affine": (True,), "feature_map": (None,)}


def heads_of(config: Config) -> int:
    """The number of heads."""
    return config.get("num_v_heads") or config["num_heads"]


def common(config: Config, keys: float, values: float, **options: Any) -> Config:
    """The options of layers with keys and values of all heads of these widths."""
    heads = heads_of(config)
    own = config["num_heads"]
    sizes = {"decoder_attention_heads": heads, "feature_dim": round(keys) // own, "expand_values": values / config["hidden_size"]}
    return sizes | {"scale_reads": True, "scale_reads_of": "keys"} | ({"key_heads": own} if own != heads else {}) | options


def by_ratio(config: Config, expand_keys: float, expand_values: float, **options: Any) -> Config:
    """Of layers whose widths are multiples of the model's."""
    width = config["hidden_size"]
    keys, values = config.get("expand_k", expand_keys), config.get("expand_v", expand_values)
    return common(config, width * keys, width * values, **options)


def by_head(config: Config, expand_values: float, **options: Any) -> Config:
    """Of layers whose heads have a width of their own."""
    width = config["head_dim"]
    values = heads_of(config) * int(width * config.get("expand_v", expand_values))
    return common(config, config["num_heads"] * width, values, **options)


def convolved(config: Config) -> Config:
    """Of layers with a short convolution, and gates that may turn around what a key reads."""
    return {"short_conv": config.get("conv_size", 4), "negative_eigenvalues": config.get("allow_neg_eigval", False)}


def delta_net(config: Config) -> Config:
    """DeltaNet."""
    return by_ratio(config, 1.0, 1.0, output_gate=config.get("use_gate", False), **convolved(config))


def gated_deltanet(config: Config) -> Config:
    """Gated DeltaNet."""
    form = "sigmoid" if config.get("output_gate_activation", "swish") == "sigmoid" else "silu"
    gate = {"output_gate": config.get("use_gate", True)}
    return by_head(config, 2.0, **gate | ({"output_gate_form": form} if gate["output_gate"] else {}), **convolved(config))


def gated_deltaproduct(config: Config) -> Config:
    """DeltaProduct, with a forget gate or without."""
    parts = {"output_gate": config.get("use_output_gate", True), "product_steps": config.get("num_householder", 1)}
    return by_head(config, 2.0, **parts, **convolved(config))


def kda(config: Config) -> Config:
    """Kimi Delta Attention."""
    width = int(config["head_dim"] * config.get("expand_v", 1.0))
    return by_head(config, 1.0, output_gate_rank=width, **convolved(config))


def gla(config: Config) -> Config:
    """Gated linear attention."""
    taps = config.get("conv_size", 4) if config.get("use_short_conv", False) else 0
    return by_ratio(config, 0.5, 1.0, output_gate=config.get("use_output_gate", True), short_conv=taps)


def retnet(config: Config) -> Config:
    """RetNet."""
    return by_ratio(config, 1.0, 2.0, output_gate=config.get("use_output_gate", True))


def hgrn2(config: Config) -> Config:
    """HGRN 2, whose layers do not read norm_eps."""
    ratio = config.get("expand_ratio", 128)
    heads = config["hidden_size"] // ratio if ratio else config["num_heads"]
    return {"decoder_attention_heads": heads, "scale_reads": True, "output_norm_eps": 1e-5}


def rwkv6(config: Config) -> Config:
    """RWKV 6."""
    sizes = by_ratio(config, 0.5, 1.0, token_shift_rank=config.get("proj_low_rank_dim", 32))
    return sizes | {"scale_reads": False, "scale_reads_of": "values", "layernorm_embedding": config.get("norm_first", True)}


def rwkv7(config: Config) -> Config:
    """RWKV 7."""
    heads = config["hidden_size"] // config["head_dim"] if config.get("head_dim") else config["num_heads"]
    rank = config.get("v_low_rank_dim", 16) if config["num_hidden_layers"] > 1 else 0
    parts = {"value_mixing_rank": rank, "output_gate_rank": config.get("gate_low_rank_dim", 128)}
    decay = config.get("decay_low_rank_dim", RANK_7)
    parts |= {"gate_rank": 0 if decay == RANK_7 else decay}
    eps = config.get("norm_eps", 1e-5) * config["hidden_size"] / heads
    parts |= {"output_norm_eps": eps, "layernorm_embedding": config.get("norm_first", True)}
    return {"decoder_attention_heads": heads} | parts


def mamba2(config: Config) -> Config:
    """Mamba 2."""
    heads, width = config["num_heads"], config["hidden_size"]
    sizes = {"decoder_attention_heads": heads, "expand_values": heads * config["head_dim"] / width, "key_heads": 1}
    sizes |= {"feature_dim": config["state_size"], "short_conv": config.get("conv_kernel", 4)}
    return sizes | {"short_conv_bias": config.get("use_conv_bias", True)}


def gsa(config: Config) -> Config:
    """Gated slot attention."""
    heads = config["num_heads"]
    return {"decoder_attention_heads": heads, "slots": config.get("num_slots") or config["hidden_size"] // heads}


CONVOLVED = {"hidden_act": SWISH, "use_short_conv": (True,)}
KINDS: dict[str, tuple[str, Callable[[Config], Config], dict[str, tuple]]] = {  # by their name: architecture, options, and what
    # values others must have, that of a configuration that says nothing first
    "delta_net": ("delta_net_lm", delta_net, CONVOLVED | {"use_beta": (True,), "qk_norm": ("l2",), "qk_activation": ("silu",)}),
    "gated_deltanet": ("gated_delta_lm", gated_deltanet, CONVOLVED),
    "gated_deltaproduct": ("gated_delta_product_lm", gated_deltaproduct, CONVOLVED),
    "kda": ("kda_lm", kda, CONVOLVED | {"safe_gate": (False,)}),
    "gla": ("gla_lm", gla, {"hidden_act": SWISH, "clamp_min": (None,), "use_gk": (True,), "use_gv": (False,)}),
    "retnet": ("retnet_lm", retnet, {"hidden_act": SWISH}),
    "gsa": (
        "gsa_lm", gsa,
        {"hidden_act": SWISH, "feature_map": ("swish",), "use_short_conv": (False,), "gate_logit_normalizer": (8,),
         "expand_k": (1,), "expand_v": (1,), "exapnd_k": (1,), "exapnd_v": (1,)},
    ),
    "hgrn2": ("hgrn2_lm", hgrn2, {"hidden_act": SWISH, "use_short_conv": (False,)}),
    "rwkv6": ("rwkv6_lm", rwkv6, {"hidden_act": ("sqrelu",), "norm_bias": (True,), "gate_low_rank_dim": (64,)}),
    "rwkv7": (
        "rwkv7_lm", rwkv7,
        {"hidden_act": ("sqrelu",), "norm_bias": (True,)},
    ),
    "mamba2": (
        "mamba2_lm", mamba2,
        {"hidden_act": SWISH, "n_groups": (1,), "use_bias": (False,), "rmsnorm": (True,), "norm_before_gate": (False,),
         "D_has_hdim": (False,)},
    ),
}  # fmt: skip


def options_of(config: Config, path: Path) -> tuple[str, Config]:
    """The architecture of a configuration, and the options beside it. Refuses what would compute something else."""
    architecture, own, required = KINDS[config["model_type"]]
    if architecture == "gated_delta_product_lm" and not config.get("use_forget_gate", False):
        architecture = "delta_product_lm"
    for name, allowed in (ALWAYS | required | dependent(config)).items():
        value = config.get(name, allowed[0])
        if value not in allowed:
            raise Mistake(f"{path} has {name} = {value!r}; fw-convert takes: {', '.join(map(str, allowed))}")
    width = config["hidden_size"]
    eps = config.get("norm_eps", config.get("layer_norm_epsilon", 1e-5 if config["model_type"][:4] in ("rwkv", "mamb") else 1e-6))
    options = {"decoder_layers": config["num_hidden_layers"], "norm_eps": eps, "output_norm_eps": eps}
    options |= {f"decoder_{name}_dim": width for name in ("embed", "input", "output")}
    options["share_decoder_input_output_embed"] = config.get("tie_word_embeddings", False)
    return architecture, options | own(config)


def dependent(config: Config) -> dict[str, tuple]:
    """What must have values that others decide."""
    width, layers = config["hidden_size"], config["num_hidden_layers"]
    limits = (None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}])
    found: dict[str, tuple] = {"num_kv_heads": (None, config.get("num_heads")), "value_dim": (None, width, [width] * layers)}
    found |= {"a_low_rank_dim": (config.get("decay_low_rank_dim", RANK_7),)}
    return found | {"dt_limit": limits, "time_step_limit": limits}
