"""The layers of architectures with the weights of flash-linear-attention's layers give what the published equations give."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from support.language_models import options_of
from support.published_layers import EPS, LAYERS

from fw_fairseq.config import FastWeightConfig, read_config
from fw_fairseq.mixers import FastWeight
from fw_fairseq.tools.convert.fla_layers import of_mixer

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]
T, C, HEADS = 70, 24, 3
WIDE = {"gated_delta_lm": 36, "retnet_lm": 48, "mamba2_lm": 48}  # values
KEYS = {"gated_delta_lm": 18, "gla_lm": 12}
WRITES = {"delta_product_lm": 2, "gated_delta_product_lm": 2}


def drawn(arch: str) -> dict[str, torch.Tensor]:
    """Random weights by the names and shapes of the published layer."""
    values, keys, n = WIDE.get(arch, C), KEYS.get(arch, C), WRITES.get(arch, 1)
    head = values // HEADS
    qkv = {"q_proj.weight": (keys, C), "k_proj.weight": (n * keys, C), "v_proj.weight": (n * values, C)}
    conv = {f"{name}_conv1d.weight": (rows, 1, 4) for name, rows in (("q", keys), ("k", n * keys), ("v", n * values))}
    out = {"o_proj.weight": (C, values)}
    swish = {"g_proj.weight": (values, C), "o_norm.weight": (head,)}
    low = {"g_proj.0.weight": (head, C), "g_proj.1.weight": (values, head), "g_proj.1.bias": (values,), "o_norm.weight": (head,)}
    low |= {"f_proj.0.weight": (head, C), "f_proj.1.weight": (keys, head), "A_log": (HEADS,), "dt_bias": (keys,)}
    beta, steps = {"b_proj.weight": (n * HEADS, C)}, {"a_proj.weight": (HEADS, C), "A_log": (HEADS,), "dt_bias": (HEADS,)}
    group = {"g_norm.weight": (C,), "g_norm.bias": (C,)}
    retnet = qkv | out | {"g_proj.weight": (values, C), "g_norm_swish_gate.weight": (head,)}
    of_6 = {f"{name}_proj.linear.weight": (C, C) for name in "rkvg"} | {"x_bias": (5, C), "x_proj.0.mu": (C,), "bonus": (HEADS, 8)}
    of_6 |= {"x_proj.0.linear.weight": (160, C), "x_proj.2.weight": (C, 160)}
    of_6 |= {"w_proj.linear.lora.0.weight": (64, C), "w_proj.linear.lora.2.weight": (C, 64), "w_proj.linear.lora.2.bias": (C,)}
    of_7 = {f"{name}_proj.weight": (C, C) for name in "rkvo"} | {f"x_{name}": (1, 1, C) for name in "rwkvag"}
    of_7 |= {"k_k": (C,), "k_a": (C,), "r_k": (HEADS, 8)} | group
    for name, rank in (("w", 64), ("a", 64), ("v", 32), ("g", 128)):
        of_7 |= {f"{name}_lora.lora.0.weight": (rank, C), f"{name}_lora.lora.2.weight": (C, rank)}
        of_7 |= {} if name == "g" else {f"{name}_lora.lora.2.bias": (C,)}
    wide = {"conv1d.weight": (values + 12, 1, 4), "conv1d.bias": (values + 12,), "in_proj.weight": (2 * values + 12 + HEADS, C)}
    shapes = {
        "delta_net_lm": qkv | conv | beta | out | {"o_norm.weight": (head,)},
        "gated_delta_lm": qkv | conv | beta | steps | swish | out,
        "kda_lm": qkv | conv | beta | low | out,
        "gdn2_lm": qkv | conv | low | out | {"b_proj.weight": (keys, C), "w_proj.weight": (values, C)},
        "delta_product_lm": qkv | conv | beta | swish | out,
        "gated_delta_product_lm": qkv | conv | beta | steps | swish | out,
        "gla_lm": retnet | {"gk_proj.0.weight": (16, C), "gk_proj.1.weight": (keys, 16), "gk_proj.1.bias": (keys,)},
        "retnet_lm": retnet,
        "hgrn2_lm": {f"{name}_proj.weight": (C, C) for name in "qfio"} | {"g_norm.weight": (C,), "lower_bound": (C,)},
        "mamba2_lm": wide
        | dict.fromkeys(["A_log", "D", "dt_bias"], (HEADS,))
        | {"norm.weight": (values,), "out_proj.weight": (C, values)},
        "rwkv6_lm": of_6 | out | group,
        "rwkv7_lm": of_7,
    }
    torch.manual_seed(0)
    weights = {}
    for name, shape in shapes[arch].items():
        weights[name] = torch.randn(shape, dtype=torch.float64) / (1 if len(shape) == 1 else math.sqrt(shape[-1]))
    if "dt_bias" in weights:
        weights["dt_bias"] -= 3  # steps of the size that they start with
    if "lower_bound" in weights:
        weights["lower_bound"] = weights["lower_bound"].sigmoid()
    return weights


def built(arch: str, **given) -> FastWeight:
    """The second of four layers, as its architecture has it."""
    given = given if arch == "rwkv7_lm" else given | {"output_norm_eps": EPS}  # the layers', without a model around them
    args = options_of(arch, decoder_embed_dim=C, decoder_attention_heads=HEADS, **given)
    return FastWeight.of_layer(C, HEADS, read_config(FastWeightConfig, args), 1, 4)


@pytest.mark.parametrize("arch", LAYERS)
def test_the_layer_is_the_published_one(arch):
    given = {"gla_lm": {"feature_dim": 4}, "mamba2_lm": {"feature_dim": 6}}.get(arch, {})
    mixer, weights, x = built(arch, **given).double(), drawn(arch), torch.randn(T, 1, C, dtype=torch.float64)
    loaded = of_mixer(mixer, weights)
    assert sum(p.numel() for p in mixer.parameters()) == sum(w.numel() for w in weights.values())
    mixer.load_state_dict(loaded)
    x.requires_grad_()
    more, shared = (), {}
    if mixer.takes_shared:
        first = torch.randn(T, C, dtype=torch.float64)
        more, shared = (first,), {"shared": {"values": first.unflatten(1, (HEADS, -1)).transpose(0, 1)[None]}}
    want, (y, _) = LAYERS[arch](x[:, 0], weights, HEADS, *more), mixer(x, **shared)
    torch.testing.assert_close(y[:, 0], want, rtol=0, atol=1e-9 * want.abs().max().item())
    direction = torch.randn_like(want)
    gradients = [torch.autograd.grad((found * direction).sum(), x)[0] for found in (want, y[:, 0])]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=1e-9 * gradients[0].abs().max().item())


@torch.no_grad()
def test_the_layer_of_mamba_2_in_transformers():
    """An implementation by others, in fp32."""
    sys.modules.setdefault("torchaudio", None)  # fairseq's, of another torch than ours: transformers would trip over it
    transformers = pytest.importorskip("transformers")
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    sizes = {"hidden_size": C, "num_heads": HEADS, "head_dim": 16, "state_size": 6, "n_groups": 1, "chunk_size": 16}
    theirs = Mamba2Mixer(transformers.Mamba2Config(**sizes, expand=2, conv_kernel=4, layer_norm_epsilon=1e-5), 0).eval()
    weights = {name: weight.float() for name, weight in drawn("mamba2_lm").items()}
    theirs.load_state_dict(weights)
    mixer, x = built("mamba2_lm", feature_dim=6), torch.randn(T, 2, C)
    mixer.load_state_dict(of_mixer(mixer, weights))
    torch.testing.assert_close(mixer(x)[0], theirs(x.transpose(0, 1)).transpose(0, 1), rtol=1e-4, atol=1e-5)
