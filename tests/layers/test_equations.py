"""Every mixer but fast weights against the equations of its paper: loops over tokens and heads in float64, written from the papers
and not from the layers. Outputs, the gradients of all weights, and what the weights are."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import layer_norm

from fw_fairseq.config import FastWeightConfig
from fw_fairseq.mixers import Abc, Additive, FwmLstm, Gsa, Leap, Linformer, LocalAttention, Lstm, Sru, Srupp, TransformerXl
from fw_fairseq.mixers.leap import log_focus

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]
C, H, D, T = 8, 2, 4, 13


def head(x, h):
    return x[h * D : (h + 1) * D]


def softmax(scores):
    weights = [torch.exp(score) for score in scores]
    return [weight / sum(weights) for weight in weights]


def mean(weights, vectors):
    return sum(w * v for w, v in zip(weights, vectors)) / sum(weights)


def seen(t, memory, segment=1):
    """Dai et al. 2019: a token sees the memory, and its own segment up to itself. Segments of one token: the last ones."""
    return range(max(0, t - memory - t % segment), t + 1)


def pooled(x, score, t, window):
    """Eqs. 4 and 9 of "Additive Attention Is All You Need?", by heads."""
    past = range(max(0, t - window + 1) if window else 0, t + 1)
    parts = []
    for h in range(H):
        weights = [torch.exp(score[h] @ head(x[s], h) / math.sqrt(D)) for s in past]
        parts.append(mean(weights, [head(x[s], h) for s in past]))
    return torch.cat(parts)


def additive(w, x, window, published):
    q, k, v = (x @ part.t() for part in w["in_proj.weight"].split(C))
    residual, p, y = [], [], []
    for t in range(len(x)):
        query = pooled(q, w["query_score"], t, window)
        query = w["out_proj.weight"] @ query if published else query
        residual.append(query * k[t])
        p.append(layer_norm(x[t] + residual[t], (C,), w["norm.weight"], w["norm.bias"]))
        weighted = pooled(p, w["key_score"], t, window) * v[t]
        y.append(residual[t] + weighted if published else w["out_proj.weight"] @ weighted)
    return y


def leap(w, x, window, published):
    q, f, k, v = (x @ part.t() for part in w["in_proj.weight"].split(C))
    y = []
    for t in range(len(x)):
        past, parts = range(max(0, t - window + 1) if window else 0, t + 1), []
        for h in range(H):
            focus = [head(f[s], h) @ head(k[s], h) / math.sqrt(D) for s in past]
            focus = [score + 1 if score > 0 else torch.exp(score) for score in focus]  # elu + 1
            key, value = (mean(focus, [head(x[s], h) for s in past]) for x in (k, v))
            parts.append(value / (1 + torch.exp(-(head(q[t], h) @ key) / math.sqrt(D))))
        y.append(torch.cat(parts) if published else w["out_proj.weight"] @ torch.cat(parts))
    return y


def sru(w, x, inner, c, rescale=True, tanh=False, bias=-2.0):
    """Lei et al. 2018; ``inner`` is what the product reads."""
    scale, y = math.sqrt(1 + 2 * math.exp(bias)) if rescale else 1, []
    biases = w["in_proj.bias"].split(C) if "in_proj.bias" in w else (0, *w["gate_bias"])
    for t in range(len(x)):
        u, forget, reset = (part @ inner[t] + b for part, b in zip(w["in_proj.weight"].split(C), biases))
        f, r = (1 / (1 + torch.exp(-(part + v * c))) for part, v in zip((forget, reset), w["gate_weight"]))
        c = f * c + (1 - f) * u
        y.append(r * (torch.tanh(c) if tanh else c) + (1 - r) * scale * x[t])
    return y, c


def projected(w, x):
    """The layers of SRU++ without attention."""
    z = [w["down_proj.weight"] @ token for token in x]
    return [layer_norm(token, token.shape, w["norm.weight"], w["norm.bias"]) for token in z]


def srupp_inner(w, x, memory, segment=1):
    """Lei 2021, one head."""
    z = [w["down_proj.weight"] @ token for token in x]
    k, v = ([part @ token for token in z] for part in w["kv_proj.weight"].chunk(2))
    inner = []
    for t, query in enumerate(z):
        past = seen(t, memory, segment)
        weights = softmax([query @ k[s] / math.sqrt(len(query)) for s in past])
        attended = query + w["alpha"] * sum(weight * v[s] for weight, s in zip(weights, past))
        inner.append(layer_norm(attended, attended.shape, w["norm.weight"], w["norm.bias"]))
    return inner


def attention(w, x, score, past):
    q, k, v = (x @ part.t() + b for part, b in zip(w["in_proj.weight"].split(C), w["in_proj.bias"].split(C)))
    y = []
    for t in range(len(x)):
        parts = []
        for h in range(H):
            weights = softmax([score(head(q[t], h), head(k[s], h), t - s, h) / math.sqrt(D) for s in past(t)])
            parts.append(sum(weight * head(v[s], h) for weight, s in zip(weights, past(t))))
        y.append(w["out_proj.weight"] @ torch.cat(parts) + w["out_proj.bias"])
    return y


def local_attention(w, x, window):
    return attention(w, x, lambda q, k, back, h: q @ k, lambda t: seen(t, window - 1))


def transformer_xl(w, x, memory, segment=1):
    """Dai et al. 2019, sec. 3.3: terms a to d of a score."""
    rates = [10000 ** (-2 * i / C) for i in range(C // 2)]

    def score(q, k, back, h):
        r = torch.tensor([f(back * rate) for f in (math.sin, math.cos) for rate in rates], dtype=torch.float64)
        position = head(w["position_proj.weight"] @ r, h)
        return q @ k + q @ position + w["content_bias"][h, 0] @ k + w["position_bias"][h, 0] @ position

    return attention(w, x, score, lambda t: seen(t, memory, segment))


def slots(w, x, weights, means):
    """Peng et al. 2022: softmax attention to sums of keys and values; ``weights`` (T,H,N)."""
    q, k, v = (x @ part.t() + b for part, b in zip(w["in_proj.weight"].split(C)[:3], w["in_proj.bias"].split(C)[:3]))
    y = []
    for t in range(len(x)):
        parts = []
        for h in range(H):
            keys, values = [], []
            for n in range(weights.shape[2]):
                shares = weights[: t + 1, h, n] / (weights[: t + 1, h, n].sum() if means else 1)
                keys.append(sum(share * head(k[s], h) for s, share in enumerate(shares)))
                values.append(sum(share * head(v[s], h) for s, share in enumerate(shares)))
            read = softmax([head(q[t], h) @ key / math.sqrt(D) for key in keys])
            parts.append(sum(weight * value for weight, value in zip(read, values)))
        y.append(w["out_proj.weight"] @ torch.cat(parts) + w["out_proj.bias"])
    return y


def abc(w, x):
    return slots(w, x, (x @ w["in_proj.weight"][3 * C :].t() + w["in_proj.bias"][3 * C :]).exp().view(len(x), H, -1), True)


def gsa(w, x):
    """Zhang et al. 2024: slots that forget."""
    N = (len(w["in_proj.weight"]) - 3 * C) // H
    keys, values, y = [torch.zeros(N, D).double()] * H, [torch.zeros(N, D).double()] * H, []
    for token in x:
        q, k, v, f = (w["in_proj.weight"] @ token).split([C, C, C, N * H])
        g, read = (1 / (1 + torch.exp(-f))) ** 0.125, []
        for h in range(H):
            mine, of_head = g[h * N : (h + 1) * N], [part[h * D : (h + 1) * D] for part in (q, k, v)]
            query, key, value = (part / (1 + torch.exp(-part)) for part in of_head)
            keys, values = [*keys], [*values]
            for slots, part in ((keys, key), (values, value)):
                slots[h] = torch.diag(mine) @ slots[h] + torch.outer(1 - mine, part)
            read.append((keys[h] @ query).softmax(0) @ values[h])
        z = torch.cat(read)
        z = z / (1 + torch.exp(-z))
        y.append(w["out_proj.weight"] @ (z / torch.sqrt((z * z).mean() + 1e-5) * w["norm.weight"]))
    return y


def lstm(w, x):
    """With a forget gate, whose bias is 1 more than b."""
    h, c, y = zeros(), zeros(), []
    for token in x:
        parts = w["in_proj.weight"] @ token + w["in_proj.bias"] + w["recurrent"] @ h
        i, f, z, o = parts.split(C)
        c = c / (1 + torch.exp(-f - 1)) + torch.tanh(z) / (1 + torch.exp(-i))
        h = torch.tanh(c) / (1 + torch.exp(-o))
        y.append(h)
    return y


def fwm_lstm(w, x, reads=2):
    """Schlag et al. 2021b: an outer product as the key of a delta write, a memory within the unit ball, reads in turn."""
    S, y = w["out_proj.weight"].shape[1], []
    memory = torch.zeros(S, S, S, dtype=torch.float64)
    for h in lstm(w, x):
        written = w["write_proj.weight"] @ h + w["write_proj.bias"]
        a, b, v = torch.tanh(written[:-1]).split(S)
        old = torch.einsum("i,j,ijv->v", a, b, memory)
        memory = memory + torch.einsum("i,j,v->ijv", a, b, (v - old) / (1 + torch.exp(-written[-1] - 1)))
        norm = memory.square().sum().sqrt()
        memory = memory / (torch.relu(norm - 1) + 1)
        n, *halves = torch.tanh(w["read_proj.weight"] @ h + w["read_proj.bias"]).split(S)
        assert len(halves) == reads
        for half in halves:
            n = layer_norm(torch.einsum("i,j,ijv->v", n, half, memory), (S,))
        y.append(h + w["out_proj.weight"] @ n + w["out_proj.bias"])
    return y


def linformer(w, x):
    places = [min(t, len(w["position_weight"]) - 1) for t in range(len(x))]  # the last vector serves all later positions
    return slots(w, x, w["position_weight"][places], False)


def zeros():
    return torch.zeros(C, dtype=torch.float64)


PAIR = {"in_proj.weight": (3 * C, C), "in_proj.bias": (3 * C,), "out_proj.weight": (C, C), "out_proj.bias": (C,)}
POOLED = {"in_proj.weight": (3 * C, C), "query_score": (H, D), "key_score": (H, D), "norm.weight": (C,), "norm.bias": (C,)}
ADDITIVE, LEAP = POOLED | {"out_proj.weight": (C, C)}, {"in_proj.weight": (4 * C, C)}
SRU = {"in_proj.weight": (3 * C, C), "in_proj.bias": (3 * C,), "gate_weight": (2, C)}
SRUPP = SRU | {"in_proj.weight": (3 * C, 2), "down_proj.weight": (2, C), "kv_proj.weight": (4, 2)}
SRUPP |= {"norm.weight": (2,), "norm.bias": (2,), "alpha": (1,)}
XL = PAIR | {"position_proj.weight": (C, C), "content_bias": (H, 1, D), "position_bias": (H, 1, D)}
NARROW = {"in_proj.weight": (3 * C, 3), "gate_bias": (2, C), "gate_weight": (2, C), "down_proj.weight": (3, C)}
NARROW |= {"norm.weight": (3,), "norm.bias": (3,)}
LSTM = {"recurrent": (4 * C, C), "in_proj.weight": (4 * C, C), "in_proj.bias": (4 * C,)}
FWM = LSTM | {"write_proj.weight": (10, C), "write_proj.bias": (10,), "read_proj.weight": (9, C), "read_proj.bias": (9,)}
FWM |= {"out_proj.weight": (C, 3), "out_proj.bias": (C,)}
CASES = {
    "additive": (lambda: Additive(C, H), lambda w, x: additive(w, x, 0, False), ADDITIVE),
    "additive, window": (lambda: Additive(C, H, window=3), lambda w, x: additive(w, x, 3, False), ADDITIVE),
    "additive, published": (
        lambda: Additive(C, H, window=3, pooling_form="published"),
        lambda w, x: additive(w, x, 3, True),
        ADDITIVE,
    ),
    "leap": (lambda: Leap(C, H), lambda w, x: leap(w, x, 0, False), LEAP | {"out_proj.weight": (C, C)}),
    "leap, window": (lambda: Leap(C, H, window=3), lambda w, x: leap(w, x, 3, False), LEAP | {"out_proj.weight": (C, C)}),
    "leap, published": (lambda: Leap(C, H, pooling_form="published"), lambda w, x: leap(w, x, 0, True), LEAP),
    "sru": (lambda: Sru(C), lambda w, x: sru(w, x, x, zeros())[0], SRU),
    "sru, tanh": (lambda: Sru(C, sru_tanh=True, sru_rescale=False), lambda w, x: sru(w, x, x, zeros(), False, True)[0], SRU),
    "sru, projected": (
        lambda: Sru(C, sru_projection=3, sru_projection_norm=True, sru_input_bias=False, sru_highway_bias=-1.0),
        lambda w, x: sru(w, x, projected(w, x), zeros(), bias=-1.0)[0],
        NARROW,
    ),
    "srupp": (lambda: Srupp(C), lambda w, x: sru(w, x, srupp_inner(w, x, 512), zeros())[0], SRUPP),
    "srupp, segments": (
        lambda: Srupp(C, srupp_memory=4, srupp_segment=3, srupp_rescale=False),
        lambda w, x: sru(w, x, srupp_inner(w, x, 4, 3), zeros(), False)[0],
        SRUPP,
    ),
    "srupp, one segment sees all": (
        lambda: Srupp(C, srupp_memory=8, srupp_segment=6),
        lambda w, x: sru(w, x, srupp_inner(w, x, 8, 6), zeros())[0],
        SRUPP,
    ),
    "local attention": (lambda: LocalAttention(C, H), lambda w, x: local_attention(w, x, 32), PAIR),
    "local attention, window": (lambda: LocalAttention(C, H, local_window=4), lambda w, x: local_attention(w, x, 4), PAIR),
    "local attention, all but one token": (
        lambda: LocalAttention(C, H, local_window=T - 1),
        lambda w, x: local_attention(w, x, T - 1),
        PAIR,
    ),
    "transformer xl": (lambda: TransformerXl(C, H), lambda w, x: transformer_xl(w, x, 256), XL),
    "transformer xl, no biases": (
        lambda: TransformerXl(C, H, bias_free=True),
        lambda w, x: transformer_xl(w | {"in_proj.bias": torch.zeros(3 * C).double(), "out_proj.bias": zeros()}, x, 256),
        {name: shape for name, shape in XL.items() if not name.endswith(".bias")},
    ),
    "transformer xl, memory": (lambda: TransformerXl(C, H, xl_memory=4), lambda w, x: transformer_xl(w, x, 4), XL),
    "transformer xl, segments": (
        lambda: TransformerXl(C, H, xl_memory=4, xl_segment=3),
        lambda w, x: transformer_xl(w, x, 4, 3),
        XL,
    ),
    "transformer xl, short segments": (
        lambda: TransformerXl(C, H, xl_memory=4, xl_segment=2),
        lambda w, x: transformer_xl(w, x, 4, 2),
        XL,
    ),
    "abc": (lambda: Abc(C, H), abc, PAIR | {"in_proj.weight": (3 * C + 32 * H, C), "in_proj.bias": (3 * C + 32 * H,)}),
    "abc, few slots": (
        lambda: Abc(C, H, slots=3),
        abc,
        PAIR | {"in_proj.weight": (3 * C + 3 * H, C), "in_proj.bias": (3 * C + 3 * H,)},
    ),
    "gsa": (
        lambda: Gsa(C, H, slots=3),
        gsa,
        {"in_proj.weight": (3 * C + 3 * H, C), "out_proj.weight": (C, C), "norm.weight": (C,)},
    ),
    "lstm": (lambda: Lstm(C), lstm, LSTM),
    "lstm with a fast weight memory": (lambda: FwmLstm(C, fwm_width=3, fwm_reads=2), fwm_lstm, FWM),
    "linformer": (lambda: Linformer(C, H), linformer, PAIR | {"position_weight": (1024, H, 32)}),
    "linformer, few positions": (
        lambda: Linformer(C, H, slots=3, slot_positions=5),
        linformer,
        PAIR | {"position_weight": (5, H, 3)},
    ),
}


def randomised(mixer):
    """In float64, with all weights drawn anew, so that no bias is 0."""
    for parameter in mixer.double().parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return mixer


def check(actual, expected, leaves):
    adjoint = torch.randn_like(expected)
    gradients = (torch.autograd.grad(y, leaves, adjoint, retain_graph=True) for y in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("build, reference, shapes", CASES.values(), ids=CASES)
def test_outputs_and_gradients_are_those_of_the_equations(build, reference, shapes):
    mixer = randomised(build())
    assert {name: tuple(p.shape) for name, p in mixer.named_parameters()} == shapes
    length = 4 if getattr(mixer, "slots", 0) == 32 else T  # the loops over many slots take long
    x, weights = torch.randn(length, C, dtype=torch.float64, requires_grad=True), dict(mixer.named_parameters())
    check(mixer(x[:, None])[0][:, 0], torch.stack(reference(weights, x)), [x, *weights.values()])


def test_the_focus_of_leap_has_one_slope_where_its_parts_meet():
    x = torch.zeros(1, requires_grad=True)
    log_focus(x).backward()
    assert x.grad == 1


@pytest.mark.parametrize("segment", [1, 6])
def test_memory_of_transformer_xl_trains_keys_and_values(segment):
    """The layer's inputs before the segment are constants; W_k and W_v are not."""
    mixer, x = randomised(TransformerXl(C, H, xl_memory=5, xl_segment=segment)), torch.randn(18, C, dtype=torch.float64)
    _, state = mixer(x[:12, None])
    leaf, weights = x[12:].clone().requires_grad_(), dict(mixer.named_parameters())
    expected = torch.stack(transformer_xl(weights, torch.cat([x[:12], leaf]), 5, segment)[12:])
    check(mixer(leaf[:, None], state.detach())[0][:, 0], expected, [leaf, *weights.values()])


@pytest.mark.parametrize("segment", [1, 6])
def test_memory_of_srupp_trains_its_projections(segment):
    mixer, x = randomised(Srupp(C, srupp_memory=5, srupp_segment=segment)), torch.randn(18, C, dtype=torch.float64)
    _, state = mixer(x[:12, None])
    leaf, weights = x[12:].clone().requires_grad_(), dict(mixer.named_parameters())
    _, c = sru(weights, x[:12], srupp_inner(weights, x[:12], 5, segment), zeros())
    inner = srupp_inner(weights, torch.cat([x[:12], leaf]), 5, segment)[12:]
    expected = torch.stack(sru(weights, leaf, inner, c.detach())[0])
    check(mixer(leaf[:, None], state.detach())[0][:, 0], expected, [leaf, *weights.values()])


@pytest.mark.parametrize("kind", [Sru, Srupp])
def test_dropout_of_the_cell_is_the_same_for_all_tokens(kind):
    """Where it drops, the input passes; elsewhere the highway's gate is divided by the share that is kept."""
    mixer, x = randomised(kind(64, sru_dropout=0.5)), torch.randn(9, 3, 64, dtype=torch.float64)
    padding = torch.zeros(3, 9, dtype=torch.bool)
    padding[1, 4] = True
    kept = mixer.eval()(x, None, padding)[0]
    y, skipped = mixer.train()(x, None, padding)[0], mixer.scale * x
    dropped = (y == skipped).all(0) | (y[:4] == skipped[:4]).all(0) & (torch.tensor([0, 1, 0])[:, None] == 1)
    assert 0.3 < dropped.double().mean() < 0.7
    expected = torch.where(dropped, skipped, 2 * kept - skipped).masked_fill(padding.t()[..., None], 0)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("kind", [Sru, Srupp])
def test_the_last_layer_drops_nothing_of_its_cell(kind):
    config = FastWeightConfig(sru_dropout=0.5)
    assert [kind.of_layer(C, 1, config, layer, 3).cell_dropout for layer in range(3)] == [0.5, 0.5, 0]


@pytest.mark.parametrize("build", [lambda p: Srupp(C, attention_dropout=p), lambda p: TransformerXl(C, H, attention_dropout=p),
                                   lambda p: LocalAttention(C, H, attention_dropout=p)])  # fmt: skip
def test_dropout_of_attention_weights(build):
    """Weights of 1/1 alone: the first token's attention is twice its value or nothing."""
    mixer, x = randomised(build(0.5)), torch.randn(1, 400, C, dtype=torch.float64)
    values = []
    inner = mixer.norm if isinstance(mixer, Srupp) else mixer.out_proj
    inner.register_forward_pre_hook(lambda module, args: values.append(args[0][0]))
    for training in (False, True):
        mixer.train(training)(x)
    plain, dropped = values
    if isinstance(mixer, Srupp):
        plain, dropped = (v - mixer.down_proj(x)[0] for v in (plain, dropped))
    share = dropped / plain
    torch.testing.assert_close(share, share.round())
    assert {*share.round().unique().tolist()} == {0.0, 2.0} and 0.8 < share.mean() < 1.2


def test_dropout_of_pooled_vectors():
    """Additive attention drops both pooled vectors; LEAP drops q, f, v and the scores."""
    mixer, x = (
        randomised(Additive(C, H, pooling_form="published", pooling_dropout=0.5)),
        torch.randn(5, 300, C, dtype=torch.float64),
    )
    read = []
    mixer.out_proj.register_forward_pre_hook(lambda module, args: read.append(args[0]))
    plain, dropped = (mixer.train(training)(x)[0] for training in (False, True))
    kept = read[1] != 0
    torch.testing.assert_close(read[1][kept], 2 * read[0][kept])
    assert 0.4 < kept.double().mean() < 0.6 and not torch.equal(plain, dropped)
    mixer, x = randomised(Leap(C, H, pooling_form="published", pooling_dropout=0.5)), torch.randn(1, 400, C, dtype=torch.float64)
    v = x[0] @ mixer.in_proj.weight[3 * C :].t()
    share = mixer.train()(x)[0][0] / v
    assert 0.4 < share.eq(0).double().mean() < 0.6, "one value alone is its mean"
    half = share[share != 0].sub(1).abs() < 1e-12
    assert half.any(), "where q is dropped whole, the sigmoid is 1/2, of twice the value"


def test_starts():
    """SRU++ draws its products as xavier does and v from -1 to 1; the published additive attention begins with plain means; the
    weights of Linformer's positions keep a sum over the slots of one size."""
    srupp = Srupp(256, sru_init="xavier", srupp_width=128, srupp_dropout=0.36)
    for layer, factor in ((srupp.down_proj, 1), (srupp.kv_proj, 1), (srupp.in_proj, 0.8)):
        bound = factor * math.sqrt(6 / sum(layer.weight.shape))
        assert 0.98 * bound < layer.weight.abs().max() <= bound
        assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert 0.95 < srupp.gate_weight.abs().max() <= 1
    assert [bias.unique().tolist() for bias in srupp.in_proj.bias.split(256)] == [[0], [0], [-2]]
    assert [bias.unique().tolist() for bias in Sru(16, sru_input_bias=False).gate_bias] == [[0], [-2]]
    for mixer in (Additive(256, 4), Leap(256, 4)):
        bound = math.sqrt(6 / 512)
        assert 0.98 * bound < mixer.out_proj.weight.abs().max() <= bound
        assert all(0.98 * bound / math.sqrt(2) < x.abs().max() <= bound / math.sqrt(2) for x in mixer.in_proj.weight.split(256))
    mixer = Additive(C, H, pooling_form="published")
    assert mixer.query_score.eq(0).all() and mixer.key_score.eq(0).all() and Additive(C, H).query_score.std() > 0.3
    xl, bound = TransformerXl(256, 4), math.sqrt(3 / 512)
    assert 0.98 * bound < xl.position_proj.weight.abs().max() <= bound
    assert xl.content_bias.eq(0).all() and xl.position_bias.eq(0).all()
    assert Linformer(C, H, slots=64).position_weight.std().item() == pytest.approx(1 / 8, rel=0.05)


@pytest.mark.parametrize("name, value", [("norm", True), ("dropout", 0.1)])
def test_what_needs_a_projection(name, value):
    with pytest.raises(ValueError, match=f"--sru-projection-{name} belongs to a projection; give its width with --sru-projection"):
        Sru(C, **{f"sru_projection_{name}": value})
