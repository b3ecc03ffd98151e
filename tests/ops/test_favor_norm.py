"""FAVOR+ under attention normalisation is the weighted mean of values that its kernel gives, at any size of queries and keys."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from fw_fairseq.config import FastWeightConfig
from fw_fairseq.feature_maps import FEATURE_MAPS
from fw_fairseq.mixers.fast_weight import FastWeight
from fw_fairseq.models.retrieval import RetrievalConfig, RetrievalModel
from fw_fairseq.modules.linear_attention import LinearAttention
from fw_fairseq.ops import fast_weight

pytestmark = pytest.mark.quick

T = 256
HALF = {torch.float16: 5e-3, torch.bfloat16: 4e-2}  # of outputs that are rounded twice
SIZES = [(16, 8, 0.3), (32, 16, 1.5), (64, 8, 1.5), (64, 256, 0.3), (64, 256, 1.5)]  # d, m, std


def log_features(phi, x, norm="none"):
    """Eqs. 31 and 32 of Schlag et al. 2021 in float64: log phi(x)."""
    x, rows = x.double(), phi.projection.double()
    projected = x @ rows.mT
    logs = torch.cat([projected, -projected], -1) - 0.5 * x.square().sum(-1, keepdim=True)
    return logs - logs.logsumexp(-1, keepdim=True) if norm == "sum" else logs


def of_layer(layer, x, norm):
    """The layer's output by head, from its own projections of x."""
    q, k, v = (by_head(part) for part in layer.in_proj(x).split(x.shape[-1], dim=-1))
    return weighted_mean(log_features(layer.feature_map, q, norm), log_features(layer.feature_map, k, norm), v)


def weighted_mean(log_q, log_k, v, causal=True, g=None):
    """Values (B,H,T,V) weighed by phi(q_t) . phi(k_s), and by the gates of the rule gated."""
    scores = torch.stack([(log_q[:, :, t, None] + log_k).logsumexp(-1) for t in range(log_q.shape[2])], dim=2)
    if g is not None:
        left = g.double().log().cumsum(-1)
        scores = scores + left.unsqueeze(-1) - left.unsqueeze(-2) + (1 - g.double()).log().unsqueeze(-2)
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ v.double()


def assert_mean(got, want, tolerance=1e-3):
    """99.9% of the outputs; values are of size 1."""
    assert got.isfinite().all()
    wrong = ((got.double() - want).abs() > tolerance * want.abs().clamp(min=0.1)).double().mean()
    assert wrong <= 1e-3, f"{wrong:.1%} of the outputs"


@pytest.mark.parametrize("d, m, std", SIZES)
@pytest.mark.parametrize("rule, backend", [("sum", "recurrent"), ("gated", "chunkwise")])
def test_operation(d, m, std, rule, backend):
    phi = FEATURE_MAPS["favor"](d, features=m)
    q, k = torch.randn(2, 1, 2, T, d) * std
    v, g = torch.randn(1, 2, T, 8), torch.rand(1, 2, T) * 0.5 + 0.4
    gates = {"g": g} if rule == "gated" else {}
    (features_q, _), (features_k, scale) = phi.scaled(q), phi.scaled(k)
    y, _ = fast_weight(features_q, features_k, v, rule, gates, None, backend, attention_norm=True, key_log_scale=scale)
    assert_mean(y, weighted_mean(log_features(phi, q), log_features(phi, k), v, g=gates.get("g")))


def build(cls, d, m, std, norm, heads=2, **options):
    """A layer whose queries and keys of inputs N(0, 1) have about the given size, and whose values come out as they are."""
    config = FastWeightConfig(feature_map="favor", favor_features=m, feature_norm=norm, update_rule="sum", **options)
    layer = cls(heads * d, heads, Namespace(**OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True))).eval()
    with torch.no_grad():
        layer.out_proj.weight.copy_(torch.eye(heads * d))
        projections = [layer.in_proj] if cls is FastWeight else [layer.q_proj, layer.kv_proj]
        keys = 2 * heads * d if cls is FastWeight else heads * d
        for projection in projections:
            nn.init.normal_(projection.weight[:keys], std=std / (heads * d) ** 0.5)
            nn.init.normal_(projection.weight[keys:], std=1 / (heads * d) ** 0.5)
    return layer


def by_head(x, heads=2):
    return x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)


@pytest.mark.cases_in_ci(4)
@pytest.mark.parametrize("norm", ["none", "sum"])
@pytest.mark.parametrize("d, m, std", SIZES)
@torch.no_grad()
def test_layer(d, m, std, norm):
    layer, x = build(FastWeight, d, m, std, norm, attention_norm=True), torch.randn(T, 1, 2 * d)
    want = of_layer(layer, x, norm)
    y, _ = layer(x)
    assert_mean(by_head(y), want)
    state, steps = None, []
    for t in range(T):
        y_t, state = layer(x[t : t + 1], state, decoding=True)
        steps.append(y_t)
    assert_mean(by_head(torch.cat(steps)), want)


@pytest.mark.parametrize("std", [1, 2, 4])
@torch.no_grad()
def test_features_of_length_one_at_any_size_of_keys(std):
    """exp(-|x|^2 / 2) is 1e-56 of keys with 64 channels of size 2; the length of the features does not depend on it."""
    config = FastWeightConfig(feature_map="favor", feature_norm="l2", update_rule="delta")
    layer = FastWeight(64, 1, config)
    x = torch.randn(T, 1, 64) * std
    logs = log_features(layer.feature_map, layer.in_proj(x)[..., 64:128].permute(1, 0, 2)[:, None])
    want = torch.nn.functional.normalize((logs - logs.amax(-1, keepdim=True)).exp(), dim=-1)
    torch.testing.assert_close(layer.operands(x).k.double(), want.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.cases_in_ci(4)
@pytest.mark.parametrize("dtype, norm", [*zip(HALF, ["none", "sum"])])
@pytest.mark.parametrize("d, m, std", SIZES)
@torch.no_grad()
def test_layer_in_half_precision(d, m, std, norm, dtype):
    """Chunks and steps; the projections are rounded, as those of the reference are."""
    layer, x = build(FastWeight, d, m, std, norm, attention_norm=True).to(dtype), torch.randn(100, 1, 2 * d).to(dtype)
    want, state, steps = of_layer(layer, x, norm), None, []
    assert_mean(by_head(layer(x)[0]), want, HALF[dtype])
    for t in range(len(x)):
        y, state = layer(x[t : t + 1], state, decoding=True)
        steps.append(y)
    assert_mean(by_head(torch.cat(steps)), want, HALF[dtype])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-3), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("norm", ["none", "sum"])
@torch.no_grad()
def test_layer_by_kernels(emulate, norm, dtype, tolerance):
    """All tokens at once, and decoding on."""
    layer, x = build(FastWeight, 32, 16, 1.5, norm, attention_norm=True).to(dtype), torch.randn(50, 1, 64).to(dtype)
    want, layer.backend = of_layer(layer, x, norm), "cuda"
    emulate()
    first, state = layer(x[:-1])
    last, _ = layer(x[-1:], state, decoding=True)
    assert_mean(by_head(torch.cat([first, last])), want, tolerance)


@pytest.mark.parametrize("norm", ["none", "sum"])
@pytest.mark.parametrize("rule", ["sum", "gated"])
@torch.no_grad()
def test_retrieval(rule, norm):
    """Keys and queries that are long, as those of a trained model are."""
    options = {"feature_map": "favor", "favor_features": 64, "feature_norm": norm, "update_rule": rule, "attention_norm": True}
    model = RetrievalModel(RetrievalConfig(**options), 30).eval()
    for projection in (model.query_projection, model.key_projection):
        projection.weight.mul_(3)
    seen = {}
    model.read = lambda q, k, v, gates: seen.update(v=v, gates=gates) or RetrievalModel.read(model, q, k, v, gates)
    keys, values, queries = torch.randint(30, (2, 60)), torch.randint(30, (2, 60)), torch.arange(30).repeat(2, 1)
    got = model(keys, values, queries)
    q = model.query_projection(model.embedding(queries))[:, None]
    k = model.key_projection(torch.cat([model.embedding(keys), nn.functional.one_hot(values, 30)], -1))[:, None]
    log_q, log_k = (log_features(model.feature_map, x, norm) for x in (q, k))
    g = seen["gates"].get("g")
    scores = torch.stack([(log_q[:, :, t, None] + log_k).logsumexp(-1) for t in range(30)], dim=2)
    if g is not None:
        left = g.double().log().cumsum(-1)
        scores = scores + (left[..., -1:] - left + (1 - g.double()).log()).unsqueeze(-2)
    assert_mean(got, (scores.softmax(-1) @ seen["v"].double()).squeeze(1))


@pytest.mark.parametrize("norm", ["none", "sum"])
@pytest.mark.parametrize("d, m, std", SIZES)
@torch.no_grad()
def test_linear_attention(d, m, std, norm):
    layer, query, source = build(LinearAttention, d, m, std, norm), torch.randn(T, 1, 2 * d), torch.randn(T, 1, 2 * d)
    mask = torch.arange(T)[None] >= T - 20
    q, (k, v) = by_head(layer.q_proj(query)), (by_head(x[: T - 20]) for x in layer.kv_proj(source).split(2 * d, dim=-1))
    want = weighted_mean(log_features(layer.feature_map, q, norm), log_features(layer.feature_map, k, norm), v, causal=False)
    assert_mean(by_head(layer(query, source, mask)[0]), want)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("d, m, std", SIZES)
@torch.no_grad()
def test_linear_attention_in_half_precision(d, m, std, dtype):
    layer, query, source = (x.to(dtype) for x in (build(LinearAttention, d, m, std, "none"), *torch.randn(2, 100, 1, 2 * d)))
    q, (k, v) = by_head(layer.q_proj(query)), (by_head(x) for x in layer.kv_proj(source).split(2 * d, dim=-1))
    want = weighted_mean(log_features(layer.feature_map, q), log_features(layer.feature_map, k), v, causal=False)
    assert_mean(by_head(layer(query, source)[0]), want, HALF[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cls", [FastWeight, LinearAttention])
@pytest.mark.parametrize("d, m, std", [(16, 8, 1.5), (64, 256, 1.5)])
def test_gradients_are_finite(cls, d, m, std, dtype):
    layer = build(cls, d, m, std, "none", **({"attention_norm": True} if cls is FastWeight else {})).to(dtype)
    x = torch.randn(60, 2, 2 * d).to(dtype).requires_grad_()
    mask = torch.arange(60)[None] >= torch.tensor([[60], [45]])
    y = layer(x, None, mask)[0] if cls is FastWeight else layer(x, x, mask)[0]
    y.float().square().sum().backward()
    assert y.isfinite().all() and y.dtype == dtype
    assert all(p.grad.isfinite().all() for p in (x, *layer.parameters()) if p.grad is not None)


@pytest.mark.parametrize("backend", ["recurrent", "chunkwise"])
def test_a_query_of_zeros_reads_zero(backend):
    q, k, v = (torch.rand(1, 1, 40, 8).requires_grad_() for _ in range(3))
    rows = (torch.arange(40) % 3 > 0)[:, None]
    y, _ = fast_weight(q * rows, k, v, "sum", None, None, backend, attention_norm=True, key_log_scale=torch.zeros(1, 1, 40))
    assert (y[:, :, ::3] == 0).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(y.square().sum(), (q, k, v)))
