"""The functions with flash-linear-attention's arguments against recurrences written from the equations, in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from fw_fairseq import fla

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]

B, T, H, K, V = 2, 37, 2, 5, 3


def recurrence(q, k, v, state, scale, log=0.0, log_of_values=0.0, beta=None, bonus=None, divides=False):
    """W = exp(log) W exp(log_of_values), then a write, or beta k (v - W^T k)^T; y = scale W^T q. ``bonus``: what a token reads of
    its own value, before its write. q and k are (B,T,H,K) with as many heads as v."""
    W, n = state if isinstance(state, tuple) else (state, None)
    n = torch.zeros_like(W[..., 0]) if n is None else n[:, 0]
    log, log_of_values = (
        x.expand(v.shape[0], v.shape[1], v.shape[2], -1) if isinstance(x, torch.Tensor) else x for x in (log, log_of_values)
    )
    outputs = []
    for t in range(q.shape[1]):
        key, query, before = k[:, t], q[:, t] * scale, W
        for axis, x in ((-1, log), (-2, log_of_values)):
            W = W if isinstance(x, float) else W * x[:, t].exp().unsqueeze(axis)
        value = v[:, t]
        if beta is not None:
            value = beta[:, t, :, None] * (value - torch.einsum("bhk,bhkv->bhv", key, W))
        W, n = W + torch.einsum("bhk,bhv->bhkv", key, value), n + key
        read = W if bonus is None else before + torch.einsum("hk,bhk,bhv->bhkv", bonus, key, v[:, t])
        y = torch.einsum("bhk,bhkv->bhv", query, read)
        outputs.append(y / ((query * n).sum(-1, keepdim=True) + 1e-10) if divides else y)
    return torch.stack(outputs, 1), (W, n[:, None]) if divides else W


def draw(*shape, positive=False):
    x = torch.randn(*shape, dtype=torch.float64)
    return (x.abs() if positive else x).requires_grad_()


def logs(*shape):
    """Log decays from nearly nothing to -2."""
    return (-2 * torch.rand(*shape, dtype=torch.float64)).requires_grad_()


def case(name, rows=B, tokens=T):
    """The tensors of a function by name, the recurrence's arguments for them, the heads of values, which gated delta rules have
    twice as many of, and whether outputs are divided."""
    heads = 2 * H if any(word in name for word in ("gated", "gdn", "kda")) else H
    divides = name in ("chunk_linear_attn", "fused_chunk_linear_attn")
    q, k = (draw(rows, tokens, H, K, positive=divides) for _ in range(2))
    given, more = {"q": q, "k": k, "v": draw(rows, tokens, heads, V)}, {"divides": divides}
    with torch.no_grad():
        k /= k.norm(dim=-1, keepdim=True)
    wide = (rows, tokens, heads)
    if "delta" in name or "gdn" in name or "kda" in name:
        given["beta"] = torch.rand(wide, dtype=torch.float64, requires_grad=True)
        more["beta"] = given["beta"]
    if "gated" in name or "gdn" in name or "simple" in name:
        given["g"] = logs(*wide)
        more["log"] = given["g"].unsqueeze(-1)
    elif "kda" in name or name == "chunk_gla":
        given["g"] = more["log"] = logs(*wide, K)
    elif name == "fused_recurrent_gla":
        given["gk"], given["gv"] = more["log"], more["log_of_values"] = logs(*wide, K), logs(*wide, V)
    elif "retention" in name:
        more["log"] = torch.log(1 - 2.0 ** (-5 - torch.arange(H, dtype=torch.float64))).view(1, 1, H, 1).expand(rows, tokens, H, 1)
    elif "rwkv6" in name:
        given = {"r": given.pop("q"), **given, "w": logs(*wide, K), "u": draw(H, K)}
        more |= {"log": given["w"], "bonus": given["u"]}
    return given, more, heads, divides


def start(texts, heads, divides):
    memory = draw(texts, heads, K, V, positive=divides)
    return (memory, draw(texts, 1, heads, K, positive=True)) if divides else memory


def flat(x):
    return [y for part in x for y in flat(part)] if isinstance(x, (tuple, list)) else [] if x is None else [x]


def grads(results, leaves):
    parts = flat(results)
    loss = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)).sum() for x in parts)
    return [*parts, *torch.autograd.grad(loss, leaves)]


def agree(one, other):
    for x, y in zip(one, other, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-8, atol=1e-9)


def expected(given, more, state, scale, heads):
    q, k = (given.get(name, given.get("r")) for name in ("q", "k"))
    q, k = (x.repeat_interleave(heads // H, 2) for x in (q, k))
    return recurrence(q, k, given["v"], state, scale, **more)


NAMES = [name for name in fla.__all__ if not name.endswith("hgrn")]


@pytest.mark.parametrize("name", NAMES)
def test_functions(name):
    """Outputs, the last state, and all gradients, from a state and with both scales; the state is returned if asked for."""
    given, more, heads, divides = case(name)
    state = start(B, heads, divides)
    leaves = [*given.values(), *flat(state)]
    for scale in (None, 0.7):
        found = getattr(fla, name)(**given, scale=scale, initial_state=state, output_final_state=True)
        agree(grads(found, leaves), grads(expected(given, more, state, K**-0.5 if scale is None else scale, heads), leaves))
    y, nothing = getattr(fla, name)(**given)
    empty = torch.zeros(B, heads, K, V, dtype=torch.float64)
    assert nothing is None
    agree([y], expected(given, more, empty, K**-0.5, heads)[:1])


@pytest.mark.parametrize("name", NAMES)
def test_packed_texts(name):
    """A row of four texts, of which one is empty, each from a state of its own."""
    limits = [0, 5, 5, 36, T]
    given, more, heads, divides = case(name, rows=1)
    state = start(len(limits) - 1, heads, divides)
    leaves = [*given.values(), *flat(state)]
    found = getattr(fla, name)(**given, initial_state=state, output_final_state=True, cu_seqlens=torch.tensor(limits))
    ys, states = [], []
    for text, (first, last) in enumerate(zip(limits, limits[1:])):
        part = lambda x: x[:, first:last] if isinstance(x, torch.Tensor) and x.shape[:2] == (1, T) else x  # noqa: B023, E731
        own = tuple(x[text : text + 1] for x in flat(state)) if divides else state[text : text + 1]
        if first == last:
            states.append(own)
            continue
        y, after = expected({n: part(x) for n, x in given.items()}, {n: part(x) for n, x in more.items()}, own, K**-0.5, heads)
        ys.append(y)
        states.append(after)
    want = torch.cat(ys, 1), tuple(map(torch.cat, zip(*states))) if divides else torch.cat(states)
    agree(grads(found, leaves), grads(want, leaves))


@pytest.mark.parametrize("name", ["fused_recurrent_simple_gla", "fused_recurrent_gla", "fused_recurrent_linear_attn"])
def test_the_other_direction(name):
    """From the last token to the first, in texts that are packed too, and with states that have values first."""
    given, more, heads, divides = case(name, rows=1)
    flipped = {n: x.flip(1) if isinstance(x, torch.Tensor) else x for n, x in more.items()}
    state = start(2, heads, divides)
    limits = torch.tensor([0, 9, T])
    y, after = getattr(fla, name)(
        **given, initial_state=state.mT, output_final_state=True, reverse=True, cu_seqlens=limits, state_v_first=True
    )
    for text, (first, last) in enumerate(zip(limits, limits[1:])):
        part = lambda x: x[:, first:last].flip(1) if isinstance(x, torch.Tensor) else x  # noqa: B023, E731
        own = {n: part(x) for n, x in more.items()}
        want, memory = expected({n: part(x) for n, x in given.items()}, own, state[text : text + 1], K**-0.5, heads)
        agree([y[:, first:last].flip(1), after[text : text + 1].mT], [want, memory])
    y, _ = getattr(fla, name)(**given, reverse=True)
    want, _ = expected({n: x.flip(1) for n, x in given.items()}, flipped, torch.zeros_like(state[:1]), K**-0.5, heads)
    agree([y], [want.flip(1)])


def test_normalised_state():
    """The sum of keys goes on, from nothing where the memory is given alone; both defaults of ``normalize``."""
    given, more, heads, _ = case("chunk_linear_attn")
    memory = start(B, heads, False)
    y, (last, sums) = fla.chunk_linear_attn(**given, initial_state=memory, output_final_state=True)
    agree(flat((y, last, sums)), flat(expected(given, more, memory, K**-0.5, heads)))
    parts = [{name: x[:, part] for name, x in given.items()} for part in (slice(0, 20), slice(20, T))]
    first, state = fla.chunk_linear_attn(**parts[0], initial_state=memory, output_final_state=True)
    second, state = fla.fused_recurrent_linear_attn(**parts[1], initial_state=state, output_final_state=True, normalize=True)
    agree([torch.cat([first, second], 1), *state], [y, last, sums])
    plain, _ = fla.chunk_linear_attn(**given, normalize=False)
    agree([plain], [fla.fused_recurrent_linear_attn(**given)[0]])


def test_gates_that_the_functions_make():
    """Of raw numbers: the published gates, their bounded form, strengths by a sigmoid, and unit queries and keys."""
    given, more, heads, _ = case("chunk_kda")
    q, k, v, g, beta = (given[name] for name in ("q", "k", "v", "g", "beta"))
    A_log, bias, zeros = draw(heads), draw(heads, K), torch.zeros(B, heads, K, V, dtype=torch.float64)
    unit = {n: given[n] / (given[n].square().sum(-1, keepdim=True) + 1e-6).sqrt() for n in ("q", "k")}
    raw = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": bias.flatten(), "use_qk_l2norm_in_kernel": True}
    raw |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    more["beta"] = 2 * beta.sigmoid()
    rate = A_log.exp()[:, None]
    for bound, log in ((None, -rate * F.softplus(g + bias)), (-5.0, -5 * (rate * (g + bias)).sigmoid())):
        want, _ = expected(given | unit, more | {"log": log}, zeros, K**-0.5, heads)
        for function in (fla.chunk_kda, fla.fused_recurrent_kda):
            agree([function(q, k, v, g, beta, **raw, lower_bound=bound, safe_gate=bound is not None)[0]], [want])
    log = -A_log.exp() * F.softplus(g[..., 0] + bias[:, 0])
    raw |= {"dt_bias": bias[:, 0], "allow_neg_eigval": False}
    want, _ = expected(given | unit, more | {"log": log.unsqueeze(-1), "beta": beta.sigmoid()}, zeros, K**-0.5, heads)
    for function in (fla.chunk_gated_delta_rule, fla.fused_recurrent_gated_delta_rule):
        agree([function(q, k, v, g=g[..., 0], beta=beta, **raw)[0]], [want])


def test_gates_that_are_left_out():
    """Nothing decays, strengths are 1, and decays of two kinds multiply."""
    given, _, heads, _ = case("fused_recurrent_gated_delta_rule")
    q, k, v, g, beta = (given[name] for name in ("q", "k", "v", "g", "beta"))
    zeros, gk = torch.zeros(B, heads, K, V, dtype=torch.float64), logs(B, T, heads, K)
    ones = torch.ones_like(beta)
    for options, log, strength in (
        ({"g": g, "gk": gk, "beta": beta}, g.unsqueeze(-1) + gk, beta),
        ({"gk": gk}, gk, ones),
        ({}, 0.0, ones),
    ):
        want, _ = expected(given, {"log": log, "beta": strength}, zeros, K**-0.5, heads)
        agree([fla.fused_recurrent_gated_delta_rule(q, k, v, **options)[0]], [want])
    agree([fla.chunk_delta_rule(q, k, v)[0]], [want])
    gamma = logs(heads)
    few = [x.repeat_interleave(2, 2) for x in (q, k)]
    want, _ = expected({"q": few[0], "k": few[1], "v": v}, {"log": gamma[:, None].expand(B, T, heads, 1)}, zeros, K**-0.5, H)
    agree([fla.chunk_simple_gla(*few, v, g_gamma=gamma)[0]], [want])
    agree([fla.chunk_simple_gla(*few, v)[0]], [fla.fused_recurrent_gla(*few, v)[0]])
    agree([fla.fused_recurrent_gla(*few, v, gk)[0]], [fla.chunk_gla(*few, v, gk)[0]])


def test_hgrn():
    x, g, h = draw(B, T, 6), logs(B, T, 6), draw(B, 6)
    outputs, last = [], h
    for t in range(T):
        last = g[:, t].exp() * last + x[:, t]
        outputs.append(last)
    want = grads((torch.stack(outputs, 1), last), [x, g, h])
    for function in (fla.chunk_hgrn, fla.fused_recurrent_hgrn):
        agree(grads(function(x, g, initial_state=h, output_final_state=True), [x, g, h]), want)


@pytest.mark.parametrize(
    "name", ["fused_recurrent_kda", "fused_recurrent_gdn", "fused_recurrent_delta_rule", "fused_recurrent_simple_gla"]
)
def test_token_by_token(name):
    """As generation calls it; bf16 tokens have a state in fp32."""
    given, more, heads, divides = case(name)
    state = start(B, heads, divides)
    want, last = expected(given, more, state, K**-0.5, heads)
    outputs = []
    for t in range(T):
        token = {n: x[:, t : t + 1] for n, x in given.items()}
        y, state = getattr(fla, name)(**token, initial_state=state, output_final_state=True)
        outputs.append(y)
    agree([torch.cat(outputs, 1), state], [want, last])
    half = {n: x.detach().bfloat16() for n, x in given.items()}
    for tokens in (T, 1):
        some = {n: x[:, :tokens] for n, x in half.items()}
        y, state = getattr(fla, name)(**some, initial_state=torch.zeros(B, heads, K, V), output_final_state=True)
        wide = {n: x.double() for n, x in some.items()}
        want, _ = getattr(fla, name)(**wide, initial_state=torch.zeros(B, heads, K, V))
        assert y.dtype == torch.bfloat16 and state.dtype == torch.float32
        torch.testing.assert_close(y.double(), want, rtol=0.05, atol=0.05)


def test_what_would_change_the_result_is_refused():
    given, _, heads, _ = case("chunk_kda", 1, 3)
    for options, sentence in (
        ({"cp_context": object()}, "knows no cp_context for this function"),
        ({"return_intermediate_states": True}, "knows no return_intermediate_states"),
        ({"transpose_state_layout": True}, "knows no transpose_state_layout"),
        ({"allow_neg_eigval": True}, "allow_neg_eigval is for use_beta_sigmoid_in_kernel=True"),
        ({"use_gate_in_kernel": True}, "A_log is None"),
    ):
        with pytest.raises(ValueError, match=sentence):
            fla.chunk_kda(**given, **options)
    gates = given | {"g": given["g"][..., 0]}
    with pytest.raises(ValueError, match="knows no gv"):
        fla.fused_recurrent_gdn(**gates, gv=torch.zeros(1, 3, heads, V))
    with pytest.raises(ValueError, match="gk is given; leave one out"):
        fla.fused_recurrent_gdn(**gates, gk=given["g"], use_gate_in_kernel=True, A_log=torch.zeros(heads))
    fla.chunk_kda(**given, chunk_size=32, cu_seqlens_cpu=None, head_first=False, safe_gate=True)
