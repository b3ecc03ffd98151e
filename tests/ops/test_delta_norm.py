"""Delta under attention normalisation, by both of its papers.

Schlag et al. 2021, eqs. 26 to 28, divide what an erase reads as well; Mao 2022, eq. 6 with z of eq. 3, divides the output alone.
The references are loops over those equations, without any eps.
"""

from __future__ import annotations

import math
from argparse import Namespace

import pytest
import torch
from omegaconf import OmegaConf
from support.draws import assert_same, draw_gates, draw_inputs, run_with_gradients
from support.language_models import build

from fw_fairseq.config import FastWeightConfig
from fw_fairseq.feature_maps import FEATURE_MAPS
from fw_fairseq.mixers.fast_weight import FastWeight
from fw_fairseq.models.retrieval import RetrievalConfig, RetrievalModel
from fw_fairseq.ops import FastWeightState, RowMap, fast_weight
from fw_fairseq.rules import RULES

pytestmark = pytest.mark.quick

BOTH = ["read", "read_and_erase"]
SHAPE = (2, 2, 41, 5, 4)
TOLERANCE = 2e-5  # the 1e-6 that is added to divisors, which are at least 0.1 here


def by_the_equations(q, k, v, beta, of, padding=None, resets=None):
    """Outputs (B,H,T,V), memories (B,H,V,K) and normalisers (B,H,K) after the last token, token by token."""
    outputs, memories, sums = [], [], []
    for b in range(len(q)):
        for h in range(q.shape[1]):
            S, z, ys = v.new_zeros(v.shape[3], k.shape[3]), k.new_zeros(k.shape[3]), []
            for t in range(q.shape[2]):
                k_t, q_t, v_t, g = k[b, h, t], q[b, h, t], v[b, h, t], beta[b, h, t]
                if resets is not None and resets[b, t]:
                    S, z = torch.zeros_like(S), torch.zeros_like(z)
                if padding is not None and padding[b, t]:
                    ys.append(torch.zeros_like(v_t))
                    continue
                known, below = S @ k_t, z @ k_t
                if of == "read_and_erase" and below > 0:
                    known = known / below
                S = S + g * torch.outer(v_t - known, k_t)
                z = z + k_t
                ys.append(S @ q_t / (z @ q_t) if z @ q_t > 0 else torch.zeros_like(v_t))
            outputs.append(torch.stack(ys))
            memories.append(S)
            sums.append(z)
    by_head = lambda x: torch.stack(x).unflatten(0, q.shape[:2])  # noqa: E731
    return by_head(outputs), by_head(memories), by_head(sums)


def draw(dtype=torch.float64, shape=SHAPE):
    return draw_inputs(shape, dtype, positive=True), draw_gates(RULES["delta"], shape, dtype)


def expected(inputs, gates, of, **masks):
    def call():
        y, S, z = by_the_equations(*inputs.values(), gates["beta"], of, **masks)
        return y, FastWeightState(S.mT, z)

    return run_with_gradients(inputs | gates, call)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("backend", ["recurrent", "chunkwise"])
@pytest.mark.parametrize("of", BOTH)
def test_the_equations(of, backend, masked):
    """Outputs, the state and all gradients; with padding and new texts, and with a cut in the middle."""
    inputs, gates = draw()
    masks = {"padding": torch.rand(2, SHAPE[2]) < 0.2, "resets": torch.rand(2, SHAPE[2]) < 0.1} if masked else {}

    def piece(start, stop, state):
        part = slice(start, stop)
        timed = {f"{name.removesuffix('s')}_mask": x[:, part] for name, x in masks.items()}
        q, k, v = (x[:, :, part] for x in inputs.values())
        options = dict(backend=backend, attention_norm=True, attention_norm_of=of)
        return fast_weight(q, k, v, "delta", {"beta": gates["beta"][:, :, part]}, state, **timed, **options)

    def in_two():
        first, state = piece(0, 17, None)
        second, state = piece(17, SHAPE[2], state)
        return torch.cat([first, second], 2), state

    want = expected(inputs, gates, of, **masks)
    assert_same(run_with_gradients(inputs | gates, lambda: piece(0, SHAPE[2], None)), want, TOLERANCE)
    assert_same(run_with_gradients(inputs | gates, in_two), want, TOLERANCE)


@pytest.mark.parametrize("of", BOTH)
def test_decoding(of):
    """Token by token, first as factors and then as a memory."""
    (inputs, gates), state, outputs = draw(), None, []
    for t in range(SHAPE[2]):
        q, k, v, beta = (x[:, :, t : t + 1] for x in (*inputs.values(), gates["beta"]))
        y, state = fast_weight(q, k, v, "delta", {"beta": beta}, state, attention_norm=True, decoding=True, attention_norm_of=of)
        outputs.append(y)
    want, memory, _ = by_the_equations(*inputs.values(), gates["beta"], of)
    torch.testing.assert_close(torch.cat(outputs, 2), want, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(state.memory, memory.mT, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("of", BOTH)
def test_kernels(emulate, of):
    inputs, gates = draw(torch.float32)
    want = expected(*({name: x.double() for name, x in part.items()} for part in (inputs, gates)), of)
    emulate()
    options = dict(backend="cuda", attention_norm=True, attention_norm_of=of)
    got = run_with_gradients(inputs | gates, lambda: fast_weight(*inputs.values(), "delta", gates, **options))
    assert_same(got, want, 5e-5)
    rows = {name: torch.randn(SHAPE[:4]) for name in "qk"}
    features = {name: RowMap("elu", norm="sum")(x.double()) for name, x in rows.items()}
    y, _ = fast_weight(*rows.values(), inputs["v"], "delta", gates, feature_map=RowMap("elu", norm="sum"), **options)
    want, *_ = by_the_equations(*features.values(), inputs["v"].double(), gates["beta"].double(), of)
    torch.testing.assert_close(y.double(), want, rtol=5e-5, atol=5e-5)


def layer_of(of, phi="relu", width=16, heads=2, **options):
    config = FastWeightConfig(attention_norm=True, attention_norm_of=of, feature_map=phi, **options)
    return FastWeight(width, heads, Namespace(**OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)))


def as_published(layer, x):
    """The layer's output (T,B,C) in float64, from its weights: features that sum to 1, a gate per head, and the equations."""
    q, k, v, beta = (part.double() for part in layer.in_proj(x).split(list(layer.sizes.values()), -1))
    heads = lambda x: x.unflatten(-1, (layer.num_heads, -1)).permute(1, 2, 0, 3)  # noqa: E731
    q, k = (phi / phi.sum(-1, keepdim=True).clamp(min=1e-300) for phi in map(layer.feature_map, (heads(q), heads(k))))
    y, *_ = by_the_equations(q, k, heads(v), torch.sigmoid(beta).permute(1, 2, 0), layer.attention_norm_of)
    return y.permute(2, 0, 1, 3).flatten(2) @ layer.out_proj.weight.double().mT + layer.out_proj.bias.double()


@pytest.mark.parametrize("phi", ["relu", "elu"])
@pytest.mark.parametrize("of", BOTH)
def test_the_layer(of, phi):
    layer, x = layer_of(of, phi).double(), torch.randn(30, 2, 16, dtype=torch.float64)
    with torch.no_grad():
        layer.in_proj.bias[-2:] = 1.0  # gates that erase
    torch.testing.assert_close(layer(x)[0], as_published(layer, x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("of", BOTH)
def test_the_two_are_not_the_same(of):
    """Each is far from the other's equations: the erase strengths differ by the number of keys so far, or more."""
    inputs, gates = draw()
    y, _ = fast_weight(**inputs, rule="delta", gates=gates, attention_norm=True, attention_norm_of=of)
    other, *_ = by_the_equations(*inputs.values(), gates["beta"], BOTH[of == "read"])
    assert (y - other).norm() > 0.1 * other.norm()


@pytest.mark.parametrize("phi", ["dpfp", "elu", "favor"])
def test_retrieval(phi):
    """The reads after the last pair."""
    options = {"feature_map": phi, "attention_norm": True, "attention_norm_of": "read", "key_dim": 4}
    model = RetrievalModel(RetrievalConfig(**options), 7).double().eval()
    keys, values, queries = torch.randint(7, (2, 20)), torch.randint(7, (2, 20)), torch.randint(7, (2, 3))
    v = torch.nn.functional.one_hot(values, 7).double()
    pairs = torch.cat([model.embedding(keys), v], -1)
    rows = model.query_projection(model.embedding(queries)), model.key_projection(pairs)
    q, k = (f / f.sum(-1, keepdim=True) for f in map(model.feature_map, rows))
    beta = torch.sigmoid(model.gates["beta"](pairs)).squeeze(-1)
    _, S, z = by_the_equations(k[:, None], k[:, None], v[:, None], beta[:, None], "read")
    want = (q[:, None] @ S.mT / (q[:, None] @ z.unsqueeze(-1))).squeeze(1)
    torch.testing.assert_close(model(keys, values, queries), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"attention_norm_of": "read"}, "--attention-norm-of is read; that is for --attention-norm with --update-rule delta$"),
        (
            {"attention_norm_of": "read", "attention_norm": True, "update_rule": "sum", "feature_norm": "none"},
            "--attention-norm-of is read; that is for --attention-norm with --update-rule delta$",
        ),
        (
            {"attention_norm_of": "read", "attention_norm": True, "feature_norm": "none"},
            "--update-rule delta diverges with keys longer than 1, as elu gives; use --feature-norm sum$",
        ),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"attention_norm_of": "output"}, "attention_norm_of is 'output'; allowed: read_and_erase, read$"),
        ({"attention_norm_of": "read"}, "attention_norm_of is 'read'; that is for attention_norm=True and a rule .*: delta$"),
        (
            {"attention_norm_of": "read", "attention_norm": True, "rule": "sum", "gates": {}},
            "attention_norm_of is 'read'; that is for attention_norm=True and a rule .*: delta$",
        ),
    ],
)
def test_refused_arguments(options, message):
    inputs, gates = draw()
    with pytest.raises(ValueError, match=message):
        fast_weight(**{**inputs, "rule": "delta", "gates": gates} | options)


# FAVOR+: features that sum to 1 may have products as small as 1e-20, which a divisor's eps must not hide.

SIZES = [(16, 8, 0.3), (32, 16, 1.5), (64, 256, 1.0), (64, 256, 1.5)]  # d, m, std of queries and keys


def favor_layer(of, d, m, std, heads=2):
    """A layer whose queries and keys of inputs N(0, 1) have about the given size, and whose values come out as they are."""
    layer = layer_of(of, "favor", heads * d, heads, favor_features=m).eval()
    with torch.no_grad():
        layer.out_proj.weight.copy_(torch.eye(heads * d))
        torch.nn.init.normal_(layer.in_proj.weight, std=1 / math.sqrt(heads * d))
        layer.in_proj.weight[: 2 * heads * d] *= std
        torch.nn.init.zeros_(layer.in_proj.bias)
    return layer


def reference(layer, x):
    """As published, with exponents that are made relative before they leave the range of float64."""
    rows = layer.feature_map.projection.double()

    def phi(x):
        logs = torch.cat([x @ rows.mT, -x @ rows.mT], -1)
        return (logs - logs.amax(-1, keepdim=True)).exp()

    plain, layer.feature_map.forward = layer.feature_map.forward, phi
    try:
        return as_published(layer, x)
    finally:
        layer.feature_map.forward = plain


def wrong(got, want, tolerance):
    """The share of outputs that are off by more; values are of size 1."""
    assert got.isfinite().all()
    return ((got.double() - want).abs() > tolerance * want.abs().clamp(min=0.1)).double().mean()


@pytest.mark.parametrize("d, m, std", SIZES)
@pytest.mark.parametrize("of", BOTH)
@torch.no_grad()
def test_favor(of, d, m, std):
    layer, x = favor_layer(of, d, m, std), torch.randn(130, 1, 2 * d)
    want = reference(layer, x)
    assert wrong(layer(x)[0], want, 1e-3) <= 1e-3
    state, steps = None, []
    for t in range(len(x)):
        y, state = layer(x[t : t + 1], state, decoding=True)
        steps.append(y)
    assert wrong(torch.cat(steps), want, 1e-3) <= 1e-3


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 0.02), (torch.bfloat16, 0.15)])
@pytest.mark.parametrize("of", BOTH)
@torch.no_grad()
def test_favor_in_half_precision(of, dtype, tolerance):
    """The projections are rounded, as the reference's are; what follows is not."""
    layer, x = favor_layer(of, 64, 256, 1.0).to(dtype), torch.randn(130, 1, 128).to(dtype)
    assert wrong(layer(x)[0], reference(layer, x), tolerance) <= 1e-2


@pytest.mark.parametrize("of", BOTH)
@torch.no_grad()
def test_favor_by_kernels(emulate, of):
    layer, x = favor_layer(of, 64, 64, 1.5), torch.randn(70, 1, 128)
    layer.backend = "cuda"
    emulate()
    assert wrong(layer(x)[0], reference(layer, x), 1e-3) <= 1e-3


@pytest.mark.parametrize("of", BOTH)
def test_favor_gradients(of):
    layer, x = favor_layer(of, 32, 16, 1.5), torch.randn(60, 1, 64)

    def gradients(output):
        return torch.autograd.grad((output.double() * adjoint).sum(), layer.in_proj.weight)[0].double()

    adjoint = torch.randn(60, 1, 64, dtype=torch.float64)
    got, want = gradients(layer(x)[0]), gradients(reference(layer, x))
    assert (got - want).norm() <= 1e-3 * want.norm()


def test_one_favor_map_is_enough():
    """The exception of the layer's eps is that of the map: only FAVOR+ has one."""
    assert [name for name, phi in FEATURE_MAPS.items() if phi.eps < 1e-6] == ["favor"]
