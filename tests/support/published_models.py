"""Whole models of flash-linear-attention in float64, by the names in their folders, around the layers of ``published_layers``."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from support.published_layers import HEADS, LAYERS, SLOTS, C, Weights, drawn, rms
from torch import Tensor
from torch.nn import functional as F

WORDS, DEPTH, UNITS, EPS = 30, 3, 40, 1e-3
SPECIAL = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 7}
SIZES = {"hidden_size": C, "num_hidden_layers": DEPTH, "intermediate_size": UNITS, "norm_eps": EPS} | SPECIAL
PRODUCT = {"head_dim": 8, "expand_v": 1.0, "num_heads": HEADS, "num_householder": 2, "allow_neg_eigval": True}
RWKV = {"hidden_act": "sqrelu"}
CONFIGS = {  # by architecture
    "delta_net_lm": {"model_type": "delta_net", "num_heads": HEADS},
    "gated_delta_lm": {"model_type": "gated_deltanet", "num_heads": HEADS, "head_dim": 6, "expand_v": 2.0},
    "gla_lm": {"model_type": "gla", "num_heads": HEADS},
    "gsa_lm": {"model_type": "gsa", "num_heads": HEADS, "num_slots": SLOTS, "feature_map": "swish"},
    "kda_lm": {"model_type": "kda", "num_heads": HEADS, "head_dim": 8},
    "mamba2_lm": {"model_type": "mamba2", "num_heads": HEADS, "head_dim": 16, "state_size": 6, "tie_word_embeddings": True},
    "hgrn2_lm": {"model_type": "hgrn2", "expand_ratio": 8},
    "retnet_lm": {"model_type": "retnet", "num_heads": HEADS},
    "rwkv6_lm": {"model_type": "rwkv6", "num_heads": HEADS, "expand_k": 1.0} | RWKV,
    "rwkv7_lm": {"model_type": "rwkv7", "head_dim": 8, "v_low_rank_dim": 32} | RWKV,
    "gated_delta_product_lm": {"model_type": "gated_deltaproduct", "use_forget_gate": True} | PRODUCT,
    "delta_product_lm": {"model_type": "gated_deltaproduct", "use_forget_gate": False} | PRODUCT,
}


def matrix(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64) / (1 if len(shape) == 1 else math.sqrt(shape[-1]))


def norm(name: str, biases: bool) -> Weights:
    return {f"{name}.weight": 1 + matrix(C) / 2} | ({f"{name}.bias": matrix(C)} if biases else {})


def weights_of(arch: str) -> Weights:
    """Random weights by the names of a folder."""
    mamba, rwkv = arch == "mamba2_lm", arch.startswith("rwkv")
    prefix, found = "backbone." if mamba else "model.", {}
    for layer in range(DEPTH):
        parts = drawn(arch, layer)
        parts.pop("lower_bound", None)
        if layer == 0:
            parts = {name: x for name, x in parts.items() if not name.startswith("v_lora")}
        of_layer = {f"{'mixer' if mamba else 'attn'}.{name}": x for name, x in parts.items()}
        of_layer |= norm("norm" if mamba else "attn_norm", rwkv)
        if rwkv:
            of_layer |= norm("ffn_norm", True) | (norm("pre_norm", True) if layer == 0 else {})
            key = "key.linear.weight" if arch == "rwkv6_lm" else "key.weight"
            of_layer |= {f"ffn.{key}": matrix(UNITS, C), "ffn.value.weight": matrix(C, UNITS)}
            of_layer |= {"ffn.x_k": matrix(C)} if arch == "rwkv7_lm" else {"ffn.key.mu": matrix(C), "ffn.receptance.mu": matrix(C)}
            of_layer |= {} if arch == "rwkv7_lm" else {"ffn.receptance.linear.weight": matrix(C, C)}
        elif not mamba:
            of_layer |= norm("mlp_norm", False) | {"mlp.down_proj.weight": matrix(C, UNITS)}
            of_layer |= {f"mlp.{half}_proj.weight": matrix(UNITS, C) for half in ("gate", "up")}
        found |= {f"{prefix}layers.{layer}.{name}": x for name, x in of_layer.items()}
    found |= {f"{prefix}{name}": x for name, x in norm("norm_f" if mamba else "norm", rwkv).items()}
    found[f"{prefix}embeddings.weight"] = torch.randn(WORDS, C, dtype=torch.float64)
    if arch == "hgrn2_lm":
        found["model.lower_bounds"] = matrix(DEPTH, C)
    return found if mamba else found | {"lm_head.weight": matrix(WORDS, C)}


def save(arch: str, folder: Path, **changed) -> Weights:
    """Writes a folder, and returns its weights."""
    weights = weights_of(arch)
    save_file({name: x.contiguous() for name, x in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(SIZES | CONFIGS[arch] | changed))
    return weights


def logits(arch: str, weights: Weights, tokens: Tensor) -> Tensor:
    """Those after each of the tokens (T), with EPS in the norms."""
    w = {name.removeprefix("model.").removeprefix("backbone."): x for name, x in weights.items()}
    x, shared = w["embeddings.weight"][tokens], []

    def normed(x: Tensor, name: str) -> Tensor:
        if f"{name}.bias" in w:
            return F.layer_norm(x, (C,), w[f"{name}.weight"], w[f"{name}.bias"], EPS)
        return rms(x, w[f"{name}.weight"], EPS)

    for layer in range(DEPTH):
        p = f"layers.{layer}."
        own = {name.removeprefix(p): y for name, y in w.items() if name.startswith(p)}
        parts = {name.partition(".")[2]: y for name, y in own.items() if name.startswith(("attn.", "mixer."))}
        x = normed(x, f"{p}pre_norm") if "pre_norm.weight" in own else x
        inner = normed(x, f"{p}{'norm' if 'norm.weight' in own else 'attn_norm'}")
        if arch == "hgrn2_lm":
            shares = w["lower_bounds"].softmax(0)
            parts["lower_bound"] = shares[1 : layer + 1].sum(0)
        if arch == "rwkv7_lm" and layer == 0:  # whose values all layers share
            before = F.pad(inner, (0, 0, 1, 0))[:-1]
            shared = [(inner + (before - inner) * parts["x_v"][0, 0]) @ parts["v_proj.weight"].mT]
            parts |= {f"v_lora.lora.{i}.weight": torch.zeros(C, C).double() for i in (0, 2)}
        x = x + LAYERS[arch](inner, parts, HEADS, *shared)
        if arch != "mamba2_lm":
            x = x + fed(normed(x, f"{p}{'ffn_norm' if 'ffn_norm.weight' in own else 'mlp_norm'}"), own)
    x = normed(x, "norm_f" if "norm_f.weight" in w else "norm")
    return x @ w.get("lm_head.weight", w["embeddings.weight"]).mT


def fed(x: Tensor, w: Weights) -> Tensor:
    """The feed-forward layer."""
    if "mlp.gate_proj.weight" in w:
        gate = x @ w["mlp.gate_proj.weight"].mT
        return (gate * torch.sigmoid(gate) * (x @ w["mlp.up_proj.weight"].mT)) @ w["mlp.down_proj.weight"].mT
    change = F.pad(x, (0, 0, 1, 0))[:-1] - x
    if "ffn.x_k" in w:
        return torch.relu((x + change * w["ffn.x_k"]) @ w["ffn.key.weight"].mT).square() @ w["ffn.value.weight"].mT
    key = torch.relu((x + change * w["ffn.key.mu"]) @ w["ffn.key.linear.weight"].mT).square()
    receptance = torch.sigmoid((x + change * w["ffn.receptance.mu"]) @ w["ffn.receptance.linear.weight"].mT)
    return receptance * (key @ w["ffn.value.weight"].mT)
