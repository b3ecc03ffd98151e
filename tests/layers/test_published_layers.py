"""The layers of architectures with the weights of flash-linear-attention's layers give what the published equations give."""

from __future__ import annotations

import sys

import pytest
import torch
from support.language_models import options_of
from support.published_layers import EPS, HEADS, LAYERS, SLOTS, C, drawn

from fw_fairseq.config import FastWeightConfig, read_config
from fw_fairseq.mixers import MIXERS, Mixer
from fw_fairseq.tools.convert.fla_layers import of_mixer

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]
T = 70


def built(arch: str, **given) -> Mixer:
    """The second of four layers, as its architecture has it."""
    given = given if arch == "rwkv7_lm" else given | {"output_norm_eps": EPS}  # the layers', without a model around them
    args = options_of(arch, decoder_embed_dim=C, decoder_attention_heads=HEADS, **given)
    return MIXERS[args.mixer].of_layer(C, HEADS, read_config(FastWeightConfig, args), 1, 4)


@pytest.mark.parametrize("arch", LAYERS)
def test_the_layer_is_the_published_one(arch):
    given = {"gla_lm": {"feature_dim": 4}, "mamba2_lm": {"feature_dim": 6}, "gsa_lm": {"slots": SLOTS}}.get(arch, {})
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
