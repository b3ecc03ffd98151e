"""Values of layer 0 in the values of all others (RWKV 7): against the formula, and what cannot go with it."""

from __future__ import annotations

import pytest
import torch
from support.language_models import SMALL, build, make_task, options_of
from torch.nn import functional as F

from fw_fairseq.mixers import FastWeight
from fw_fairseq.models.fast_weight_lm import FastWeightLanguageModel

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]
T, B, C, HEADS, RANK = 7, 2, 12, 3, 2
RWKV_7 = {"update_rule": "rwkv7", "feature_map": "identity", "feature_norm": "none", "token_shift": True, "value_mixing_rank": RANK}


def layers(rule: str, **options) -> list[FastWeight]:
    plain = {"feature_map": "identity", "feature_norm": "l2", "value_mixing_rank": RANK}
    return [FastWeight(C, HEADS, update_rule=rule, layer=i, layers=3, **plain | options).double().eval() for i in range(3)]


@torch.no_grad()
def test_values_are_mixed_channel_by_channel():
    """The shares read the same mixture of a token and the one before it as the values. At the start no token changes them."""
    first, _, last = layers("sum", token_shift=True)
    channels = torch.arange(C).double() / (C - 1) - 0.5
    torch.testing.assert_close(last.mixing.bias.double(), 0.73 - 0.4 * channels)
    assert last.in_proj.weight[-RANK:].abs().max() == 0 and "mixing" not in first.sizes
    torch.nn.init.normal_(last.in_proj.weight)
    torch.nn.init.uniform_(last.shift.weight)
    x, shared = torch.randn(2, T, B, C, dtype=torch.float64), {}
    first(x[0], shared=shared)
    found, _ = last(x[1], shared=shared)
    before = F.pad(x, (0, 0, 0, 0, 1, 0))[:, :-1]
    parts = []
    for mixer, own, earlier in zip((first, last), x, before):
        mixtures = [own + share * (earlier - own) for share in mixer.shift.weight]
        rows = zip(mixer.in_proj.weight.split(C), mixer.in_proj.bias.split(C), (*mixtures, mixtures[2]))
        parts.append([mixture @ weight.T + bias for weight, bias, mixture in rows])
    (_, _, old), (q, k, new, low) = parts
    share = torch.sigmoid(low @ last.mixing.up.T + last.mixing.bias)
    v = new + share * (old - new)
    for row in range(B):
        memory, want = torch.zeros(HEADS, C // HEADS, C // HEADS, dtype=torch.float64), []
        for t in range(T):
            query, key = (F.normalize(part[t, row].view(HEADS, -1), dim=-1) for part in (q, k))
            memory = memory + key[:, :, None] * v[t, row].view(HEADS, 1, -1)
            want.append(torch.einsum("hk,hkv->hv", query, memory).flatten())
        torch.testing.assert_close(found[:, row], last.out_proj(torch.stack(want)))


@torch.no_grad()
def test_shares_of_nothing_and_of_all():
    """A share of 0 leaves a layer as it was, also with several writes for each token; a share of 1 gives it other values."""
    first, _, last = layers("delta_product", product_steps=2)
    x, shared = torch.randn(T, B, C, dtype=torch.float64), {}
    plain = FastWeight(C, HEADS, update_rule="delta_product", feature_map="identity", feature_norm="l2", product_steps=2).double()
    kept = sum(plain.sizes.values())
    plain.load_state_dict(
        {name: w[:kept] if "in_proj" in name else w for name, w in last.state_dict().items() if "mixing" not in name}
    )
    first(2 * x, shared=shared)
    last.mixing.bias.fill_(-1e3)
    torch.testing.assert_close(last(x, shared=shared)[0], plain(x)[0])
    last.mixing.bias.fill_(1e3)
    start = plain.sizes["q"] + plain.sizes["k"]
    rows = slice(start, start + plain.sizes["v"])
    plain.in_proj.weight[rows], plain.in_proj.bias[rows] = 2 * first.in_proj.weight[rows], first.in_proj.bias[rows]
    torch.testing.assert_close(last(x, shared=shared)[0], plain(x)[0])


def test_the_first_layer_learns_from_what_the_others_mix_in():
    """Its values reach the loss when its own output does not."""
    model, tokens = build(**RWKV_7), torch.randint(4, 40, (2, 5))
    torch.nn.init.zeros_(model.decoder.layers[0].self_attn.mixer.out_proj.weight)
    model(tokens)[0][:, -1].square().sum().backward()
    mixer = model.decoder.layers[0].self_attn.mixer
    start = mixer.sizes["q"] + mixer.sizes["k"]
    assert mixer.in_proj.weight.grad[start : start + mixer.sizes["v"]].abs().max() > 0
    assert model.state_size() == build(**RWKV_7 | {"value_mixing_rank": 0}).state_size()


def test_shares_of_one_number():
    first, _, last = layers("sum", value_mixing_rank=1)
    assert (first.in_proj.out_features, last.in_proj.out_features) == (3 * C, 3 * C + 1)


def test_a_layer_without_the_first_one_is_refused():
    *_, last = layers("sum")
    with pytest.raises(ValueError, match=r"^a layer with --value-mixing-rank needs shared, in which layer 0 leaves its values$"):
        last(torch.randn(T, B, C, dtype=torch.float64))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"mixer_pattern": "softmax,fast_weight"}, "--value-mixing-rank mixes in the values of layer 0, which is softmax"),
        ({"decoder_layerdrop": 0.1}, "--value-mixing-rank does not work with --decoder-layerdrop"),
        ({"checkpoint_activations": True}, "--value-mixing-rank does not work with --checkpoint-activations"),
        ({"reversible": True, "decoder_normalize_before": True}, "--value-mixing-rank does not work with --reversible"),
        ({"qkv_sparsity": 4, "token_shift": False}, "--value-mixing-rank does not work with --qkv-sparsity"),
        ({"encoder_layers": 2}, "--value-mixing-rank does not work with --encoder-layers"),
        ({"decoder_layers_to_keep": "1"}, "--decoder-layers-to-keep leaves out layer 0, whose values the others mix in; keep it"),
    ],
)
def test_refused(options, message):
    args = options_of("fast_weight_lm", **SMALL | RWKV_7 | options)
    with pytest.raises(ValueError, match=f"^{message}"):
        FastWeightLanguageModel.build_model(args, make_task(40))
