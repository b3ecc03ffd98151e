"""Feature maps against their formulas, in every dtype, and in checkpoints."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from fw_fairseq.config import FastWeightConfig
from fw_fairseq.feature_maps import FEATURE_MAPS, draw_projection, sum_normalise, wide
from fw_fairseq.mixers.parts.features import build_feature_map, normalised_features
from fw_fairseq.ops import fast_weight

pytestmark = pytest.mark.quick

NON_NEGATIVE = [name for name, phi in FEATURE_MAPS.items() if phi.non_negative]


@pytest.mark.parametrize("name", FEATURE_MAPS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_shape_dtype_and_gradient(name, dtype):
    phi = FEATURE_MAPS[name](8)
    x = torch.randn(2, 3, 5, 8).to(dtype).requires_grad_()
    features, again = phi(x), phi(x)
    assert features.shape == (2, 3, 5, phi.out_dim) and features.dtype == dtype
    assert torch.equal(features, again)
    features.float().square().sum().backward()
    assert x.grad.isfinite().all() and x.grad.abs().sum() > 0
    assert phi.equation and (not phi.non_negative or (features >= 0).all())


def test_closed_forms():
    x = torch.randn(7, 4, dtype=torch.float64)
    assert torch.equal(FEATURE_MAPS["identity"](4)(x), x)
    torch.testing.assert_close(FEATURE_MAPS["elu"](4)(x), torch.where(x > 0, x + 1, x.exp()))
    torch.testing.assert_close(FEATURE_MAPS["tanh"](4)(x), (x.exp() - (-x).exp()) / (x.exp() + (-x).exp()))


@pytest.mark.parametrize("nu", [1, 2, 3])
def test_dpfp_is_eq_37(nu):
    """phi_{i + 2d(j-1)} = r_i r_{i-j} with r = [relu(x), relu(-x)], indices modulo 2d: index by index."""
    d = 5
    x = torch.randn(d, dtype=torch.float64)
    r = [max(value, 0.0) for value in x.tolist()] + [max(-value, 0.0) for value in x.tolist()]
    want = [r[i] * r[(i - j) % (2 * d)] for j in range(1, nu + 1) for i in range(2 * d)]
    phi = FEATURE_MAPS["dpfp"](d, nu=nu)
    torch.testing.assert_close(phi(x), torch.tensor(want, dtype=torch.float64))
    assert phi.out_dim == 2 * nu * d


def test_learned_relu_is_per_head():
    phi = FEATURE_MAPS["relu"](4, out_dim=6, heads=3)
    x = torch.randn(2, 3, 5, 4)
    for h in range(3):
        torch.testing.assert_close(phi(x)[:, h], torch.relu(x[:, h] @ phi.weight[h] + phi.bias[h]))
    assert {n for n, _ in phi.named_parameters()} == {"weight", "bias"}


def test_the_start_of_a_learned_relu():
    """Xavier's uniform numbers for each head, up to (6 / (64 + 96))^(1/2), and no bias."""
    phi = FEATURE_MAPS["relu"](64, out_dim=96, heads=3)
    assert ((phi.weight.abs().amax((1, 2)) - 0.193649).abs() < 0.001).all() and (phi.bias == 0).all()
    assert phi.weight.abs().mean().item() == pytest.approx(0.193649 / 2, rel=0.05)


def test_what_maps_promise():
    """Sum and attention normalisation need the one; an erase without normalisation the other."""
    assert NON_NEGATIVE == ["elu", "relu", "dpfp", "favor", "favor_relu"]
    assert [name for name, phi in FEATURE_MAPS.items() if phi.at_most_one] == ["rfa"]


@pytest.mark.parametrize("total, sum_after", [(1e-3, 1.0), (1e-6, 1.0), (5e-7, 0.5), (1e-8, 0.01)])
def test_a_sum_below_one_millionth_counts_as_that(total, sum_after):
    features = torch.tensor([0.25, 0.75], dtype=torch.float64) * total
    torch.testing.assert_close(sum_normalise(features), torch.tensor([0.25, 0.75], dtype=torch.float64) * sum_after)


def test_sum_normalisation_is_safe_at_zero():
    x = torch.cat([torch.zeros(1, 6), torch.eye(6)[:1] * 0, torch.rand(4, 6)]).requires_grad_()
    normalised = sum_normalise(FEATURE_MAPS["dpfp"](6)(x))
    torch.testing.assert_close(normalised.sum(-1), torch.tensor([0.0, 0, 1, 1, 1, 1]))
    normalised.square().sum().backward()
    assert x.grad.isfinite().all()


def test_dpfp_vector_without_features_writes_and_reads_nothing():
    """A single active coordinate makes an all-zero DPFP vector: with sum normalisation that step leaves the memory alone."""
    phi = FEATURE_MAPS["dpfp"](4)
    x = torch.rand(1, 1, 6, 4)
    x[:, :, 3] = torch.tensor([1.0, 0, 0, 0])
    k = sum_normalise(phi(x))
    v = torch.randn(1, 1, 6, 3)
    y, state = fast_weight(k, k, v, "delta", {"beta": torch.full((1, 1, 6), 0.5)})
    kept = [0, 1, 2, 4, 5]
    want, final = fast_weight(k[:, :, kept], k[:, :, kept], v[:, :, kept], "delta", {"beta": torch.full((1, 1, 5), 0.5)})
    torch.testing.assert_close(y[:, :, kept], want)
    assert (y[:, :, 3] == 0).all() and torch.allclose(state.memory, final.memory)


def test_projection_blocks_are_orthogonal_with_gaussian_lengths():
    rows = draw_projection(40, 16)
    for start in range(0, 40, 16):
        block = F.normalize(rows[start : start + 16], dim=-1)
        torch.testing.assert_close(block @ block.mT, torch.eye(len(block)), rtol=0, atol=1e-5)
    lengths = draw_projection(4096, 16).norm(dim=-1)
    assert abs(lengths.square().mean() / 16 - 1) < 0.05 and lengths.std() > 0.5  # chi with 16 degrees, not one fixed length
    assert abs(draw_projection(4096, 16).mean()) < 0.02


@pytest.mark.parametrize("orthogonal", [False, True])
def test_favor_estimates_the_softmax_kernel(orthogonal):
    x, y = torch.randn(2, 8) * 0.4
    phi = FEATURE_MAPS["favor"](8, features=20000, orthogonal=orthogonal)
    assert abs((phi(x) @ phi(y)) / (x @ y).exp() - 1) < 0.05


@pytest.mark.parametrize("name", ["favor", "favor_relu", "rfa"])
def test_random_directions_are_orthogonal_within_blocks(name):
    def largest_cosine(**options) -> float:
        rows = FEATURE_MAPS[name](8, features=24, **options).projection.unflatten(0, (3, 8))
        rows = rows / rows.norm(dim=-1, keepdim=True)
        return float((rows @ rows.mT - torch.eye(8)).abs().max())

    assert largest_cosine() < 1e-5 < 0.3 < largest_cosine(orthogonal=False)


def test_favor_formula_and_prescale():
    x = torch.randn(3, 8, dtype=torch.float64)
    phi = FEATURE_MAPS["favor"](8, features=5)
    projected = x @ phi.projection.double().mT
    want = torch.cat([projected, -projected], -1).exp() * (-x.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(10)
    torch.testing.assert_close(phi(x), want)
    prescaled = FEATURE_MAPS["favor"](8, features=5, prescale=True)
    prescaled.load_state_dict(phi.state_dict())
    torch.testing.assert_close(prescaled(x), phi(x * 8**-0.25))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_favor_with_the_causal_stabiliser_in_half_precision(dtype):
    """Where the bare features overflow fp16: the output is that of float64, and no later key changes it."""
    shape = (1, 2, 60, 16)
    q, k, v = (torch.randn(shape) * scale for scale in (3.0, 3.0, 1.0))
    phi = FEATURE_MAPS["favor"](16, features=64)
    k[:, :, 30] = phi.projection[0] * 0.9  # one exponent far above all others

    def run(dtype, k):
        queries, _ = phi.scaled(wide(q.to(dtype)))  # as the layers do it: 16 bits do not hold the features
        keys, log_scale = phi.scaled(wide(k.to(dtype)))
        return fast_weight(queries, keys, wide(v.to(dtype)), "sum", attention_norm=True, key_log_scale=log_scale)[0].to(dtype)

    got, want = run(dtype, k), run(torch.float64, k)
    assert got.isfinite().all()
    assert (got.double() - want).norm() / want.norm() < 8 * torch.finfo(dtype).eps * 3**2  # errors of exponents of size |x|^2
    later = k.clone()
    later[:, :, 30:] = 5.0
    assert torch.equal(run(dtype, later)[:, :, :30], got[:, :, :30])


def test_favor_with_relu():
    """Its kernel is that of two half-planes at an angle a: |x||y| (sin a + (pi - a) cos a) / 2 pi (Cho & Saul 2009)."""
    phi, (x, y) = FEATURE_MAPS["favor_relu"](8, features=20000), torch.randn(2, 8, dtype=torch.float64)
    angle = torch.acos(F.cosine_similarity(x, y, dim=0))
    kernel = x.norm() * y.norm() * (angle.sin() + (math.pi - angle) * angle.cos()) / (2 * math.pi)
    assert phi.out_dim == 20000 and abs(phi(x) @ phi(y) / kernel - 1) < 0.05
    small = FEATURE_MAPS["favor_relu"](8, features=5)
    torch.testing.assert_close(small(x), (small.projection.double() @ x).clamp(min=0) / math.sqrt(5))


def test_rfa_estimates_the_gaussian_kernel():
    x, y = F.normalize(torch.randn(2, 8), dim=-1)
    phi = FEATURE_MAPS["rfa"](8, features=20000)
    assert abs(phi(x * 3) @ phi(y * 0.1) - (-(x - y).square().sum() / 2).exp()) < 0.03
    assert [n for n, _ in phi.named_parameters()] == ["scale"]


@pytest.mark.parametrize("name", ["favor", "favor_relu", "rfa"])
def test_random_features_are_those_of_fp32_under_autocast(name):
    phi, x = FEATURE_MAPS[name](8), torch.randn(5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        features, projected = phi(x), phi.project(x)
    assert torch.equal(features, phi(x))
    torch.testing.assert_close(projected.double(), x.double() @ phi.projection.double().mT, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["favor", "favor_relu", "rfa"])
def test_random_features_are_redrawn_in_training_and_kept_for_evaluation(name):
    phi, x = FEATURE_MAPS[name](8, features=6), torch.randn(4, 8)
    kept = phi.eval()(x)
    phi.train().redraw()
    first = phi(x)
    assert torch.equal(first, phi(x)) and not torch.equal(first, kept)
    phi.redraw()
    assert not torch.equal(first, phi(x))
    assert torch.equal(phi.eval()(x), kept)
    restored = FEATURE_MAPS[name](8, features=6).eval()
    assert not torch.equal(restored(x), kept)
    restored.load_state_dict(phi.state_dict())
    assert torch.equal(restored(x), kept)


def test_scaled_features_times_their_scale_are_the_features():
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    for name in NON_NEGATIVE:
        phi = FEATURE_MAPS[name](8)
        features, log_scale = phi.scaled(x)
        if log_scale is not None:
            assert features.max() == 1
            features = features * log_scale.exp().unsqueeze(-1)
        torch.testing.assert_close(features, phi(x))


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("dpfp", {"nu": 0}, "nu is 0"),
        ("dpfp", {"nu": 16}, "nu is 16"),
        ("relu", {"out_dim": -1}, "out_dim is -1"),
        ("relu", {"heads": 0}, "heads is 0"),
    ],
)
def test_bad_options(name, options, message):
    with pytest.raises(ValueError, match=message):
        FEATURE_MAPS[name](8, **options)


@pytest.mark.parametrize(
    "name, keep_scale, dtype",
    [("favor", True, torch.float32), ("favor", False, torch.float16), ("elu", True, torch.float32), ("elu", False, torch.float16)],
)
def test_features_whose_products_16_bits_do_not_hold_have_more(name, keep_scale, dtype):
    """With ``keep_scale`` a divisor is made of them, whose gradient fp16 does not hold either."""
    features, _ = normalised_features(FEATURE_MAPS[name](4), "none", torch.randn(3, 4).half(), keep_scale)
    assert features.dtype == dtype


@pytest.mark.parametrize("nu", [16, 99])
def test_a_nu_too_large_is_refused_by_its_option(nu):
    build_feature_map(FastWeightConfig(feature_map="dpfp", dpfp_nu=15), 8, 2)
    with pytest.raises(ValueError, match=f"--dpfp-nu is {nu}; with keys of width 8 per head it must be at most 15"):
        build_feature_map(FastWeightConfig(feature_map="dpfp", dpfp_nu=nu), 8, 2)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_bad_width(name):
    with pytest.raises(ValueError, match="head_dim is 0; it must be an integer of at least 1"):
        FEATURE_MAPS[name](0)


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_a_single_vector(name):
    phi = FEATURE_MAPS[name](6)
    assert phi(torch.randn(6)).shape == (phi.out_dim,)
    assert not phi.at_most_one or (phi(torch.randn(9, 6) * 5).norm(dim=-1) <= 1 + 1e-5).all()


@pytest.mark.parametrize("name", ["identity", "elu", "tanh"])
def test_elementwise_maps_have_no_other_width(name):
    with pytest.raises(TypeError):
        FEATURE_MAPS[name](6, out_dim=3)


@pytest.mark.parametrize("way", ["l2", "rfa"])
def test_a_vector_of_zeros_has_no_huge_gradient(way):
    """Its length has none, and 1 / 1e-12 would be the largest gradient of a batch by far."""
    x = torch.cat([torch.zeros(1, 8), torch.randn(4, 8)]).requires_grad_()
    y = FEATURE_MAPS["rfa"](8)(x) if way == "rfa" else normalised_features(FEATURE_MAPS["identity"](8), "l2", x, False)[0]
    if way == "l2":
        torch.testing.assert_close(y[1:], F.normalize(x[1:], dim=-1))
        assert not y[0].any()
    (y * torch.randn_like(y)).sum().backward()
    assert 0 < x.grad[0].abs().max() < 100 and x.grad.isfinite().all()


def test_sum_normalisation_has_a_gradient_at_zero_in_half_precision():
    x = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float16, requires_grad=True)
    sum_normalise(FEATURE_MAPS["dpfp"](4)(x)).sum().backward()
    assert x.grad.isfinite().all()
