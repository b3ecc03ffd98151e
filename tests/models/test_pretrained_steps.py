"""The steps of generation for the heads of a pretrained attention, against one pass over all tokens."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch

from fw_fairseq.ops.native import library

transformers = pytest.importorskip("transformers")
from fw_fairseq.pretrained.attention import Pass, StateLayer, read  # noqa: E402
from fw_fairseq.pretrained.heads import Sizes, make_heads  # noqa: E402
from fw_fairseq.pretrained.steps import HeadsStep  # noqa: E402

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]
SIZES, TOKENS = Sizes(16, 4, 2, 6, 5), 14
NORMED = {"feature_map": "relu", "feature_norm": "l2"}
RULES = {
    "gated_delta": NORMED,
    "delta": {"feature_map": "elu", "feature_norm": "sum"},
    "kda": NORMED | {"output_norm": True},
    "decay": {"feature_map": "identity", "feature_norm": "none"},
    "gated": {"feature_map": "dpfp", "feature_norm": "sum"},
    "gated-normalised": {"feature_map": "elu", "feature_norm": "none", "attention_norm": True},
}


def made(rule: str, window: int, name: str = "fast_weight"):
    """Heads in fp64 whose parameters are not those of the start, and what they read from."""
    torch.manual_seed(1)
    options = {"update_rule": rule.partition("-")[0], "local_window": 4, **RULES[rule]}
    heads = make_heads(name, SIZES, options, window, 0, 1).double().eval()
    for parameter in heads.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.3)
    x, q = torch.randn(3, TOKENS, SIZES.width).double(), torch.randn(3, SIZES.heads, TOKENS, SIZES.key_dim).double()
    k, v = (torch.randn(3, SIZES.groups, TOKENS, width).double() for width in (SIZES.key_dim, SIZES.value_dim))
    return heads, (x, q, k, v)


def reads(heads, given, cache, start: int, stop: int) -> torch.Tensor:
    """What the heads read in one call of the attention function, (B,T,H,V)."""
    x, q, k, v = given
    part = slice(start, stop)
    module = SimpleNamespace(heads=heads, layer_idx=0)
    parts = {"layer_input": x[:, part], "memories": Pass(), "state_cache": cache, "scaling": 1.0}
    return read(module, q[:, :, part], k[:, :, part], v[:, :, part], None, **parts)[0]


@torch.no_grad()
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("prompt", [0, 2, 7])
def test_steps_are_one_pass(rule, window, prompt):
    """From any prompt on; a step in between reads as a pass does, and so do copies and rows in another order."""
    heads, given = made(rule, window)
    whole = reads(heads, given, SimpleNamespace(layers=[]), 0, TOKENS)
    cache, got = SimpleNamespace(layers=[]), []
    for start, stop in [*([(0, prompt)] if prompt else []), *((i, i + 1) for i in range(prompt, 10))]:
        got.append(reads(heads, given, cache, start, stop))
    torch.testing.assert_close(torch.cat(got, 1), whole[:, :10], rtol=1e-9, atol=1e-9)
    place = cache.layers[0]
    assert isinstance(place, StateLayer) and place.length == 10
    if library() is not None:
        assert isinstance(place.held, HeadsStep)
    copied = copy.deepcopy(cache)
    torch.testing.assert_close(reads(heads, given, copied, 10, 14), whole[:, 10:], rtol=1e-9, atol=1e-9)
    order = torch.tensor([2, 0, 0])
    place.reorder_cache(order)
    other = [part[order] for part in given]
    got = torch.cat([reads(heads, other, cache, i, i + 1) for i in range(10, 14)], 1)
    torch.testing.assert_close(got, whole[order, 10:], rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_a_window_alone_steps():
    heads, given = made("delta", 0, "local_attention")
    whole, cache = reads(heads, given, SimpleNamespace(layers=[]), 0, TOKENS), SimpleNamespace(layers=[])
    got = [reads(heads, given, cache, 0, 3), *(reads(heads, given, cache, i, i + 1) for i in range(3, TOKENS))]
    torch.testing.assert_close(torch.cat(got, 1), whole, rtol=1e-9, atol=1e-9)
    assert isinstance(cache.layers[0].held, HeadsStep)
