"""The weights of a layer of flash-linear-attention as those of a mixer with the same options."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ...mixers import FastWeight, Gsa

Tensors = dict[str, Tensor]
ROWS = {  # rows of the input projection by the names in the layer's state dict that may make them
    "q": ("q_proj", "r_proj.linear", "r_proj"),
    "k": ("k_proj", "k_proj.linear"),
    "v": ("v_proj", "i_proj", "v_proj.linear"),
    "output": ("g_proj", "g_proj.0", "g_proj.linear", "g_lora.lora.0"),
    "g": ("a_proj",),
    "beta": ("b_proj",),
    "b": ("b_proj",),
    "w": ("w_proj",),
    "f": ("f_proj", "f_proj.0", "gk_proj.0", "w_proj.linear.lora.0"),
    "s": ("w_lora.lora.0", "a_proj"),
    "c": ("a_lora.lora.0",),
    "mixing": ("v_lora.lora.0",),
}
OTHERS = {  # parameters of the mixer by the names that may have them
    "gate.up": ("g_proj.1.weight", "g_lora.lora.2.weight"),
    "gate.bias": ("g_proj.1.bias",),
    "norm.weight": ("o_norm.weight", "g_norm.weight", "g_norm_swish_gate.weight", "norm.weight"),
    "norm.bias": ("g_norm.bias",),
    "out_proj.weight": ("o_proj.weight", "out_proj.weight"),
    "own": ("r_k",),
    "makers.g.rate": ("A_log",),
    "makers.g.bias": ("dt_bias",),
    "makers.b.bias": ("decay",),
    "makers.d.bias": ("D",),
    "makers.s.rate": ("A_log",),
    "makers.f.rate": ("A_log",),
    "makers.f.up": ("f_proj.1.weight", "gk_proj.1.weight", "w_proj.linear.lora.2.weight"),
    "makers.f.bias": ("dt_bias", "gk_proj.1.bias", "w_proj.linear.lora.2.bias"),
    "makers.u.bias": ("bonus",),
    "makers.s.up": ("w_lora.lora.2.weight",),
    "makers.s.bias": ("dt_bias", "w_lora.lora.2.bias"),
    "makers.c.up": ("a_lora.lora.2.weight",),
    "makers.c.bias": ("a_lora.lora.2.bias",),
    "makers.kappa.bias": ("k_k",),
    "makers.a.bias": ("k_a",),
    "mixing.up": ("v_lora.lora.2.weight",),
    "mixing.bias": ("v_lora.lora.2.bias",),
}
SHIFT_6, SHIFT_7 = "rkvwg", {"q": "x_r", "k": "x_k", "v": "x_v", "s": "x_w", "c": "x_a", "output": "x_g"}


def of_mixer(mixer: FastWeight | Gsa, weights: Tensors) -> Tensors:
    """The parameters of ``mixer``, from the state dict of a layer. HGRN 2 has its bound in ``lower_bound`` (C)."""
    weights = taken_apart(mixer, weights) if "in_proj.weight" in weights else weights
    rows = [find(weights, [f"{name}.weight" for name in ROWS[part]]) for part, size in mixer.sizes.items() if size]
    made = {"in_proj.weight": torch.cat(rows)}
    for name, parameter in mixer.named_parameters():
        if name.startswith("conv."):
            made[name] = convolution(weights, name.removeprefix("conv."))
        elif name.startswith("shift."):
            made |= shift_7(mixer, weights) if "x_r" in weights else shift_6(weights)
        elif name == "makers.f.bias" and "lower_bound" in weights:
            made[name] = weights["lower_bound"].logit()
        elif name != "in_proj.weight":
            made[name] = find(weights, OTHERS[name]).reshape(parameter.shape)
    return made


def find(weights: Tensors, names: Iterable[str]) -> Tensor:
    """The first of these weights that there is."""
    return next(weights[name] for name in names if name in weights)


def taken_apart(mixer: FastWeight | Gsa, weights: Tensors) -> Tensors:
    """Mamba 2's weights, with a projection for each part."""
    sizes = mixer.sizes
    order = [sizes[name] for name in ("output", "v", "k", "q", "s")]
    names = ("g_proj", "v_proj", "k_proj", "q_proj", "w_lora.lora.0")
    parts = dict(zip((f"{name}.weight" for name in names), weights["in_proj.weight"].split(order)))
    for kind in ("weight", "bias"):
        v, k, q = weights[f"conv1d.{kind}"].split([sizes["v"], sizes["k"], sizes["q"]])
        parts |= {f"{name}_conv1d.{kind}": part for name, part in zip("qkv", (q, k, v))}
    return weights | parts


def convolution(weights: Tensors, kind: str) -> Tensor:
    """The weights of the convolution, (taps,C) with that of the token itself first, or its biases."""
    part = torch.cat([weights[f"{name}_conv1d.{kind}"] for name in "qkv"])
    return part[:, 0].flip(1).mT if kind == "weight" else part


def shift_7(mixer: FastWeight | Gsa, weights: Tensors) -> Tensors:
    """The mixtures of RWKV 7."""
    return {"shift.weight": torch.cat([weights[SHIFT_7[name]][0] for name, n in mixer.sizes.items() if n and name in SHIFT_7])}


def shift_6(weights: Tensors) -> Tensors:
    """The mixtures of RWKV 6, whose parts are in another order."""
    order = ["rwkvg".index(part) for part in SHIFT_6]
    width = weights["x_bias"].shape[1]
    down = weights["x_proj.0.linear.weight"].unflatten(0, (5, -1))[order]
    up = weights["x_proj.2.weight"].view(width, 5, -1).permute(1, 2, 0)[order]
    made = {"weight": weights["x_bias"][order], "both": weights["x_proj.0.mu"], "down": down.flatten(0, 1), "up": up}
    return {f"shift.{name}": part for name, part in made.items()}
