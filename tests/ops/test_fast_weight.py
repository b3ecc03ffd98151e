"""The public op: every form against the step form, for every rule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.compiled import compile_and_record
from support.draws import (
    CASES,
    CHUNKED,
    FITTING,
    NORMALISED,
    PLAIN,
    assert_same,
    draw_gates,
    draw_inputs,
    draw_state,
    run_with_gradients,
)

from fw_fairseq.feature_maps import NORMS, ROW_MAPS, RowMap
from fw_fairseq.ops import FastWeightState, fast_weight
from fw_fairseq.ops.chunkwise.frames import ChannelGates, TokenGates
from fw_fairseq.ops.chunkwise.large_gates import SMALLEST_FP32_GATE, LargeChannelGates
from fw_fairseq.ops.chunkwise.scan import plan
from fw_fairseq.rules import RULES, Coefficients, Gate, Rule

pytestmark = pytest.mark.quick

FLOAT64 = 1e-10  # float64 sums in another order; 100 times what is seen
GATE64 = 1e-8  # a gate's gradient is a difference of float64 sums divided by the gate: 1e-16 / 1e-6, and some room
FLOAT32 = 2e-5  # fp32 sums over at most 200 tokens in another order; for gates also differences of them divided by 0.01
HALF = {torch.bfloat16: 2e-2, torch.float16: 3e-3}  # a few roundings of the output and of its gradients to 8 or 11 bits
CHUNKED_CASES = [(rule, norm) for rule, norm in CASES if rule in CHUNKED]
SHAPE = (2, 3, 75, 6, 5)  # whole chunks and a part, of every way to run one


def compare(rule, shape, tolerance, *, dtype=torch.float64, attention_norm=False, with_state=False, padding=False, extreme=False):
    """Chunk form in ``dtype`` against step form in float64: outputs, final state, all gradients."""
    spec = RULES[rule]
    inputs = draw_inputs(shape, dtype, positive=attention_norm)
    gates = draw_gates(spec, shape, torch.float32 if dtype.itemsize == 2 else dtype, extreme)
    state = draw_state(spec, shape, torch.float32 if dtype.itemsize == 2 else dtype, attention_norm) if with_state else None
    mask = torch.rand(shape[0], shape[2]) < 0.3 if padding else None

    def results(dtype, backend):
        leaves = inputs | gates | ({} if state is None else {n: x for n, x in state._asdict().items() if x is not None})
        leaves = {n: x.detach().to(dtype or x.dtype).requires_grad_() for n, x in leaves.items()}
        start = None if state is None else FastWeightState(*(leaves.get(n) for n in FastWeightState._fields))
        call = dict(rule=rule, gates={n: leaves[n] for n in gates}, state=start, attention_norm=attention_norm)
        q, k, v = (leaves[n] for n in "qkv")
        return run_with_gradients(leaves, lambda: fast_weight(q, k, v, padding_mask=mask, backend=backend, **call))

    assert_same(results(None, "chunkwise"), results(torch.float64, "recurrent"), tolerance)


@pytest.mark.parametrize("with_state, padding", [(False, False), (True, True)])
@pytest.mark.parametrize("rule, attention_norm", CHUNKED_CASES)
def test_chunk_form_equals_step_form(rule, attention_norm, with_state, padding):
    compare(rule, SHAPE, FLOAT64, attention_norm=attention_norm, with_state=with_state, padding=padding)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, GATE64), (torch.float32, FLOAT32)])
@pytest.mark.parametrize("rule", FITTING)
def test_gates_at_both_extremes(rule, dtype, tolerance):
    """Not for fwm, whose gradient jumps where the memory reaches the ball: rounding decides on which side it is."""
    compare(rule, (2, 2, 150, 4, 5), tolerance, dtype=dtype, with_state=True, extreme=True)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, GATE64), (torch.float32, FLOAT32)])
@pytest.mark.parametrize("rule", FITTING)
def test_small_gates_everywhere(rule, dtype, tolerance):
    """Gradients are then small differences of what no gate decays, unless that is left out."""
    inputs = draw_inputs(SHAPE, dtype)
    gates = {n: (g.detach() * 9e-3 + 1e-3).requires_grad_() for n, g in draw_gates(RULES[rule], SHAPE, dtype).items()}

    def results(to, backend):
        leaves = {n: x.detach().to(to).requires_grad_() for n, x in (inputs | gates).items()}
        q, k, v = (leaves[n] for n in "qkv")
        return run_with_gradients(leaves, lambda: fast_weight(q, k, v, rule, {n: leaves[n] for n in gates}, backend=backend))

    assert_same(results(dtype, "chunkwise"), results(torch.float64, "recurrent"), tolerance)


@pytest.mark.parametrize("rule", CHUNKED)
def test_incoming_gradients_stay_as_they_are(rule):
    """The gradient of the final memory belongs to the caller."""
    inputs = draw_inputs(SHAPE, torch.float32)
    _, state = fast_weight(**inputs, rule=rule, gates=draw_gates(RULES[rule], SHAPE, torch.float32), backend="chunkwise")
    given = torch.randn_like(state.memory)
    kept = given.clone()
    torch.autograd.grad(state.memory, inputs["k"], given)
    assert torch.equal(given, kept)


@pytest.mark.parametrize("rule", CHUNKED)
def test_gates_exactly_zero_and_one(rule):
    """Where a sigmoid saturates. True gradients may be 0, hence the absolute tolerance."""
    shape = (1, 2, 70, 4, 4)
    q, k, v = draw_inputs(shape).values()
    for value in (0.0, 1.0):
        gates = {n: torch.full_like(g, value).requires_grad_() for n, g in draw_gates(RULES[rule], shape).items()}
        leaves = {"q": q, "k": k, "v": v} | gates

        def results(backend, leaves=leaves, gates=gates):
            return run_with_gradients(leaves, lambda: fast_weight(q, k, v, rule, gates, backend=backend))

        assert_same(results("chunkwise"), results("recurrent"), 5e-6, smallest=1.0)


@pytest.mark.parametrize("rule, attention_norm", CHUNKED_CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(rule, attention_norm, dtype):
    compare(rule, SHAPE, HALF.get(dtype, FLOAT32), dtype=dtype, attention_norm=attention_norm, with_state=True)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_output_and_state_dtypes(rule, dtype):
    shape = (1, 2, 9, 4, 3)
    q, k, v = (x.detach() for x in draw_inputs(shape, dtype).values())
    y, state = fast_weight(q, k, v, rule, draw_gates(RULES[rule], shape, dtype))
    assert y.dtype == dtype and y.shape == v.shape
    assert state.memory.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    rule=st.sampled_from(CHUNKED),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 131), st.integers(1, 9), st.integers(1, 9)),
    with_state=st.booleans(),
    padding=st.booleans(),
)
def test_any_shape(rule, sizes, with_state, padding):
    compare(rule, sizes, FLOAT64, with_state=with_state, padding=padding)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(rule=st.sampled_from(CHUNKED), order=st.permutations(range(4)), step=st.integers(1, 2), seed=st.integers(0, 99))
def test_any_strides(rule, order, step, seed):
    """Views of every memory order, with gaps, give what contiguous tensors give, and so do their gradients."""
    torch.manual_seed(seed)
    shape = (2, 2, 40, 3, 3)
    inputs = draw_inputs(shape) | draw_gates(RULES[rule], shape)

    def strided(x):
        axes = [a for a in order if a < x.dim()]
        spread = [n * step for n in x.permute(axes).shape]
        base = torch.zeros(spread, dtype=x.dtype)[tuple(slice(None, None, step) for _ in spread)]
        view = base.permute([axes.index(a) for a in range(x.dim())])
        view.copy_(x.detach())
        return view.requires_grad_()

    def results(leaves):
        gates = {n: g for n, g in leaves.items() if n not in "qkv"}
        q, k, v = (leaves[n] for n in "qkv")
        return run_with_gradients(leaves, lambda: fast_weight(q, k, v, rule, gates, backend="chunkwise"))

    assert_same(results({n: strided(x) for n, x in inputs.items()}), results(inputs), FLOAT64)


@pytest.mark.parametrize("rule", [name for name in FITTING if RULES[name].simple])
def test_fairseq_layout_is_not_copied(rule):
    """q, k, v as slices of one (T,B,C) projection: y comes back in the layout of v, ready for the output projection."""
    T, B, H, D = 40, 2, 3, 4
    q, k, v = (x.view(T, B, H, D).permute(1, 2, 0, 3) for x in torch.randn(T, B, 3 * H * D).chunk(3, dim=-1))
    y, _ = fast_weight(q, k, v, rule, draw_gates(RULES[rule], (B, H, T, D, D), torch.float32))
    assert y.permute(2, 0, 1, 3).is_contiguous()


@pytest.mark.parametrize("rule, attention_norm", CASES)
@pytest.mark.parametrize("cuts", [[32], [1, 2, 3, 40], [31, 33, 74]])
def test_any_cut_gives_the_same(rule, attention_norm, cuts):
    """forward(x[0:T]) equals forward(x[0:s]) then forward(x[s:T], state): outputs, final state and gradients."""
    inputs = draw_inputs(SHAPE, positive=attention_norm)
    gates = draw_gates(RULES[rule], SHAPE)

    def whole():
        return fast_weight(*inputs.values(), rule, gates, attention_norm=attention_norm)

    def in_pieces():
        outputs, state = [], None
        for start, stop in zip([0, *cuts], [*cuts, SHAPE[2]]):
            piece = {n: x[:, :, start:stop] for n, x in gates.items()}
            q, k, v = (x[:, :, start:stop] for x in inputs.values())
            y, state = fast_weight(q, k, v, rule, piece, state, attention_norm=attention_norm)
            outputs.append(y)
        return torch.cat(outputs, dim=2), state

    leaves = inputs | gates
    assert_same(run_with_gradients(leaves, in_pieces), run_with_gradients(leaves, whole), FLOAT64)


@pytest.mark.parametrize(
    "rule, backend", [*((rule, "chunkwise") for rule in CHUNKED), ("rwkv7", "recurrent"), ("decay", "recurrent")]
)
def test_gradcheck(rule, backend):
    shape = (1, 2, 5, 3, 2)
    inputs, gates = draw_inputs(shape), draw_gates(RULES[rule], shape)
    memory = torch.randn(1, 2, 3, 2, dtype=torch.float64, requires_grad=True)

    def call(memory, q, k, v, *gate_values):
        y, state = fast_weight(q, k, v, rule, dict(zip(gates, gate_values)), FastWeightState(memory), backend)
        return y, state.memory

    assert torch.autograd.gradcheck(call, (memory, *inputs.values(), *gates.values()))


@pytest.mark.parametrize("rule", CHUNKED)
def test_twice_backward_gives_the_same(rule):
    """Nothing that the backward keeps is used up."""
    inputs, gates = draw_inputs(SHAPE), draw_gates(RULES[rule], SHAPE)
    leaves = [*inputs.values(), *gates.values()]
    y, state = fast_weight(*inputs.values(), rule, gates)
    loss = y.square().sum() + state.memory.square().sum()
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(loss, leaves)))


def test_double_backward_is_refused():
    q, k, v = draw_inputs(SHAPE).values()
    y, _ = fast_weight(q, k, v, "sum")
    (dq,) = torch.autograd.grad(y.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_a_penalty_on_a_gradient_is_refused_rather_than_lost():
    """Also where the gradients that come in are constants, and whatever the penalty is differentiated by."""
    q, k, v = draw_inputs(SHAPE).values()
    y, _ = fast_weight(q, k, v, "sum")
    (dq,) = torch.autograd.grad(y.sum(), q, create_graph=True)
    assert torch.equal(dq, torch.autograd.grad(fast_weight(q, k, v, "sum")[0].sum(), q)[0])
    for loss, leaves in ((dq.sum(), (k,)), (k.sum() + dq.sum(), (k, v))):
        with pytest.raises(RuntimeError, match=r"fast_weight has such gradients with backend='recurrent'"):
            torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("rule", CHUNKED)
def test_a_penalty_on_a_gradient_is_refused_under_every_rule(rule):
    inputs, gates = draw_inputs(SHAPE), draw_gates(RULES[rule], SHAPE)
    y, _ = fast_weight(*inputs.values(), rule, gates, backend="chunkwise")
    found = torch.autograd.grad(y.square().sum(), inputs["k"], create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable"):
        torch.autograd.grad(found.square().sum(), inputs["k"])


def test_steps_have_gradients_of_gradients():
    q, k, v = (x.detach().requires_grad_() for x in torch.randn(3, 1, 1, 3, 2, dtype=torch.float64))
    assert torch.autograd.gradgradcheck(lambda *x: fast_weight(*x, "sum", backend="recurrent")[0], (q, k, v))


@pytest.mark.parametrize("rule", NORMALISED)
def test_divided_steps_have_gradients_of_gradients_and_transforms(rule):
    """Under delta, what an erase reads is divided, too."""
    shape = (1, 1, 3, 2, 2)
    gates, (q, k, v) = draw_gates(RULES[rule], shape), draw_inputs(shape, positive=True).values()

    def call(q, k, v, *parts):
        return fast_weight(q, k, v, rule, dict(zip(gates, parts)), backend="recurrent", attention_norm=True)[0]

    leaves = [q, k, v, *gates.values()]
    assert torch.autograd.gradgradcheck(call, leaves)
    fixed = [x.detach() for x in leaves]
    gradient = torch.autograd.grad(call(*leaves).sum(), leaves[:3])
    torch.testing.assert_close(torch.func.grad(lambda *x: call(*x).sum(), argnums=(0, 1, 2))(*fixed), gradient)
    along = [torch.randn_like(x) for x in fixed[:3]]
    _, slope = torch.func.jvp(lambda *x: call(*x, *fixed[3:]).sum(), tuple(fixed[:3]), tuple(along))
    torch.testing.assert_close(slope, sum((a * d).sum() for a, d in zip(along, gradient)))
    several = [torch.stack([x, x.flip(2)]) for x in fixed]
    torch.testing.assert_close(torch.func.vmap(call)(*several), torch.stack([call(*fixed), call(*(x.flip(2) for x in fixed))]))


@pytest.mark.parametrize("rule, attention_norm", CASES)
def test_causal(rule, attention_norm):
    q, k, v = (x.detach() for x in draw_inputs(SHAPE, positive=True).values())
    gates = {n: g.detach() for n, g in draw_gates(RULES[rule], SHAPE).items()}
    before, _ = fast_weight(q, k, v, rule, gates, attention_norm=attention_norm)
    t = 40
    for x in (q, k, v, *gates.values()):
        x[:, :, t] *= 0.5
    after, _ = fast_weight(q, k, v, rule, gates, attention_norm=attention_norm)
    torch.testing.assert_close(after[:, :, :t], before[:, :, :t], rtol=0, atol=1e-12)
    assert (after[:, :, t] != before[:, :, t]).any()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", ["recurrent", "auto"])
def test_padding_leaves_no_trace(rule, backend):
    """Left, right and inner padding, with garbage in it: outputs there are 0, elsewhere as without padding; the state too."""
    shape = (1, 2, 50, 4, 3)
    inputs, gates = draw_inputs(shape), draw_gates(RULES[rule], shape)
    mask = torch.zeros(1, 50, dtype=torch.bool)
    mask[0, [0, 1, 20, 21, 22, 48, 49]] = True
    kept = ~mask[0]
    padded = [x.detach().masked_fill(mask[:, None, :, None], float("nan")) for x in inputs.values()]
    garbage = {n: g.masked_fill(mask[:, None] if g.dim() == 3 else mask[:, None, :, None], float("nan")) for n, g in gates.items()}
    y, state = fast_weight(*padded, rule, garbage, padding_mask=mask, backend=backend)
    plain = {n: g[:, :, kept] for n, g in gates.items()}
    want, final = fast_weight(*(x[:, :, kept] for x in inputs.values()), rule, plain, backend=backend)
    assert (y[:, :, mask[0]] == 0).all()
    torch.testing.assert_close(y[:, :, kept], want)
    torch.testing.assert_close(state.memory, final.memory)


@pytest.mark.parametrize(
    "row_map", [RowMap(name, 1, norm) for name in ROW_MAPS for norm in NORMS if (name, norm) != ("identity", "sum")]
)
@pytest.mark.parametrize("rule", ["sum", "delta_product"])
def test_garbage_in_padding_has_no_gradient_through_a_feature_map(rule, row_map):
    """Rules with one and with two keys for each query. Gradients at padding are 0, elsewhere as without the garbage."""
    count = 2 if rule == "delta_product" else 1
    shape, keys = (1, 2, 9, 4, 3), (1, 2, 9 * count, 4, 3)
    q, (_, k, v), gates = draw_inputs(shape)["q"], draw_inputs(keys).values(), draw_gates(RULES[rule], keys)
    mask = torch.zeros(1, 9, dtype=torch.bool)
    mask[0, [0, 4, 8]] = True
    hidden = mask.repeat_interleave(count, 1)[:, None, :, None]
    gradients = []
    for garbage in (0.5, float("nan")):
        leaves = [
            x.detach().masked_fill(m, garbage).requires_grad_() for x, m in ((q, mask[:, None, :, None]), (k, hidden), (v, hidden))
        ]
        y, _ = fast_weight(*leaves, rule, gates, feature_map=row_map, padding_mask=mask)
        gradients.append(torch.autograd.grad(y.square().sum(), leaves))
    for (clean, found), padded in zip(zip(*gradients), (mask[:, None, :, None], hidden, hidden)):
        assert (found.masked_select(padded) == 0).all() and found.abs().sum() > 0
        torch.testing.assert_close(found, clean)


@pytest.mark.parametrize("backend", ["recurrent", "chunkwise"])
def test_a_text_that_ends_in_padding_leaves_no_scale(backend):
    """The memory is emptied by a reset at padding, and what a text of much larger keys left must not make later ones vanish."""
    q, k, v = torch.rand(3, 1, 1, 6, 4).double().abs().unbind()
    scale = torch.tensor([0.0, 300.0, 0.0, 0.0, -600.0, -601.0]).double()[None, None]
    masks = [torch.tensor([[place in where for place in range(6)]]) for where in ((2, 3), (2,))]
    options = dict(attention_norm=True, backend=backend)

    def run(part):
        padding, resets = (mask[:, part] for mask in masks)
        state = None if part.start == 0 else first
        return fast_weight(
            *(x[:, :, part].float() for x in (q, k, v)), "sum", None, state,
            key_log_scale=scale[:, :, part].float(), padding_mask=padding, reset_mask=resets, **options,
        )  # fmt: skip

    first = run(slice(0, 4))[1]
    assert first.log_scale.item() == -torch.inf and not first.memory.any()
    weights = (k[:, :, 4:] * (scale[:, :, 4:] + 600).exp().unsqueeze(-1)) @ q[:, :, 4:].mT  # (1,1,2,2): key by query
    weights = weights.triu()
    want = weights.mT @ v[:, :, 4:] / weights.sum(2).unsqueeze(-1)
    torch.testing.assert_close(run(slice(4, 6))[0].double(), want, rtol=1e-5, atol=1e-6)


def test_a_state_moves_with_its_positions_and_masks_as_they_are():
    """A position beyond what a half-precision number holds, and a mask."""
    state = FastWeightState(torch.randn(1, 2, 3, 4), position=torch.tensor([[70001]]), recent=torch.tensor([[True]]))
    moved = state.to(torch.float16)
    assert moved.memory.dtype == torch.float16 and moved.normaliser is None
    assert moved.position.equal(state.position) and moved.recent.equal(state.recent)
    assert {x.device.type for x in state.to("meta") if x is not None} == {"meta"}
    assert state.to(device="meta", dtype=torch.float64).memory.dtype == torch.float64


def test_identical_keys_stay_accurate():
    """The worst case for the erase: one key over and over at full strength. Each read gives exactly the last value."""
    k = torch.nn.functional.normalize(torch.ones(1, 1, 200, 16), dim=-1)
    v = torch.randn(1, 1, 200, 16)
    y, _ = fast_weight(k, k, v, "delta", {"beta": torch.ones(1, 1, 200)})
    torch.testing.assert_close(y, v, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rule", [r for r in NORMALISED if RULES[r].normaliser == "write"])
def test_key_log_scale(rule):
    """Scaled keys give what the keys times exp(scale) give in float64, over any cut, where fp16 keys would be infinite."""
    inputs, gates = draw_inputs(SHAPE, positive=True), draw_gates(RULES[rule], SHAPE)
    scale = (torch.randn(SHAPE[:3], dtype=torch.float64) * 6).requires_grad_()
    mask = torch.zeros(SHAPE[0], SHAPE[2], dtype=torch.bool)
    mask[:, :3] = mask[:, 60:] = True
    leaves = inputs | gates | {"scale": scale}
    q, k, v = inputs.values()
    options = dict(attention_norm=True, padding_mask=mask)
    plain = run_with_gradients(
        leaves,
        lambda: (fast_weight(q, k * scale.exp().unsqueeze(-1), v, rule, gates, eps=1e-30, **options)[0], FastWeightState(None)),
    )
    scaled = run_with_gradients(
        leaves, lambda: (fast_weight(q, k, v, rule, gates, key_log_scale=scale, **options)[0], FastWeightState(None))
    )
    assert_same(scaled, plain, FLOAT64)

    def piece(start, stop, state):
        cut = [x[:, :, start:stop] for x in (q, k, v)]
        gates_cut = {n: g[:, :, start:stop] for n, g in gates.items()}
        return fast_weight(*cut, rule, gates_cut, state, attention_norm=True, key_log_scale=scale[:, :, start:stop])

    whole, final = piece(0, 75, None)
    first, state = piece(0, 33, None)
    second, state = piece(33, 75, state)
    torch.testing.assert_close(torch.cat([first, second], 2), whole)
    torch.testing.assert_close(state.memory, final.memory)

    huge = [x.detach().half() for x in (q, k, v)]
    y, _ = fast_weight(*huge, rule, {n: g.half() for n, g in gates.items()}, attention_norm=True, key_log_scale=scale * 100)
    assert y.isfinite().all()


@pytest.mark.parametrize("backend", ["recurrent", "auto"])
@pytest.mark.parametrize("rule", [r for r in NORMALISED if RULES[r].normaliser == "write"])
def test_a_scale_does_not_outlive_its_keys(rule, backend):
    """A new text, and what is left after gates of 1/2, are as if a key 30 nats larger had never been."""
    q, k, v = (x.detach().float() for x in draw_inputs(SHAPE, positive=True).values())
    gates = {n: torch.full_like(g, 0.5, dtype=torch.float32) for n, g in draw_gates(RULES[rule], SHAPE).items()}
    mask = torch.zeros(SHAPE[0], SHAPE[2], dtype=torch.bool)
    mask[:, 40] = rule == "sum"
    plain, large = torch.zeros(2, *SHAPE[:3])
    large[:, :, 0] = 30
    results = [
        fast_weight(q, k, v, rule, gates, attention_norm=True, key_log_scale=scale, reset_mask=mask, backend=backend)
        for scale in (large, plain)
    ]
    (y, state), (want, final) = results
    rows = slice(40 if rule == "sum" else 74, None)
    torch.testing.assert_close(y[:, :, rows], want[:, :, rows], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.log_scale, final.log_scale)


def test_delta_attention_norm_after_a_text_of_large_keys():
    q, k, v = (x.detach().float() for x in draw_inputs(SHAPE, positive=True).values())
    beta = {"beta": torch.rand(SHAPE[:3])}
    mask = torch.zeros(SHAPE[0], SHAPE[2], dtype=torch.bool)
    mask[:, 40] = True
    large = torch.where(torch.arange(SHAPE[2]) < 40, 1e5, 1.0)[:, None]
    y, state = fast_weight(q, k * large, v, "delta", beta, attention_norm=True, reset_mask=mask, backend="recurrent")
    second = [x[:, :, 40:] for x in (q, k, v)]
    want, final = fast_weight(*second, "delta", {"beta": beta["beta"][:, :, 40:]}, attention_norm=True, backend="recurrent")
    torch.testing.assert_close(y[:, :, 40:], want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.normaliser, final.normaliser)


@pytest.mark.cases_in_ci(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    "rule, zeros", [*((rule, False) for rule in CHUNKED if RULES[rule].coefficients), ("gated_delta", True), ("gla", True)]
)
def test_compiled_by_torch_as_one_operator_with_its_gradients(rule, zeros):
    """Against the step form; gates of 0 need other ways to run a chunk."""

    def call(*leaves, backend="auto"):
        q, k, v, memory, *parts = leaves
        return fast_weight(q, k, v, rule, dict(zip(gates, parts)), FastWeightState(memory), backend=backend)

    gates = draw_gates(RULES[rule], SHAPE)
    if zeros:
        gates = {name: torch.where(torch.rand(g.shape) < 0.2, 0.0, g.detach()).requires_grad_() for name, g in gates.items()}
    leaves = draw_inputs(SHAPE) | {"memory": draw_state(RULES[rule], SHAPE).memory} | gates
    compiled, graphs = compile_and_record(call)
    found = run_with_gradients(leaves, lambda: compiled(*leaves.values()))
    expected = run_with_gradients(leaves, lambda: call(*leaves.values(), backend="recurrent"))
    assert_same(found, expected, 5e-6 if zeros else GATE64, smallest=1.0)
    assert graphs == [["fw_fairseq.scan_portable"]]


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize(
    "rule, dtype",
    [
        ("sum", torch.bfloat16),
        ("gated", torch.float64),
        ("decay", torch.float64),
        ("delta", torch.bfloat16),
        ("kda", torch.float64),
    ],
)
def test_opcheck(rule, dtype):
    """Shapes, strides and gradients, also for inputs that lie otherwise in memory."""
    shape = (2, 3, 40, 6, 5)
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in draw_inputs(shape, dtype).values())
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    memory = draw_state(RULES[rule], shape, wide).memory.detach().requires_grad_()
    gates = draw_gates(RULES[rule], shape, wide)
    given = [None if x is None else x.detach().clone().requires_grad_() for x in RULES[rule].coefficients(**gates)]
    torch.library.opcheck(torch.ops.fw_fairseq.scan_portable.default, (q, k, v, *given, memory, True))
    with torch.no_grad():
        torch.library.opcheck(torch.ops.fw_fairseq.scan_portable.default, (q, k, v, *given, memory, False))
    with pytest.raises(RuntimeError, match="fw_fairseq::scan_portable was called with keep=False on tensors that"):
        torch.ops.fw_fairseq.scan_portable(q, k, v, *given, memory, False)


@pytest.mark.slow
@pytest.mark.parametrize("rule, backend", [("decay", "recurrent"), ("fwm", "auto")])
def test_steps_compiled_by_torch_as_one_operator(rule, backend):
    """torch.compile would unroll them. With texts that end and begin; a single token is part of the graph."""
    shape = (2, 2, 12, 4, 3)

    def call(q, k, v, memory, *parts):
        masks = dict(padding_mask=padding[:, : q.shape[2]], reset_mask=reset[:, : q.shape[2]])
        return fast_weight(q, k, v, rule, dict(zip(gates, parts)), FastWeightState(memory), backend=backend, **masks)

    gates = draw_gates(RULES[rule], shape)
    padding, reset = torch.arange(12) >= torch.tensor([[9], [12]]), (torch.arange(12) == 7).expand(2, -1)
    leaves = draw_inputs(shape) | {"memory": draw_state(RULES[rule], shape).memory} | gates
    compiled, graphs = compile_and_record(call, dynamic=False)
    found = run_with_gradients(leaves, lambda: compiled(*leaves.values()))
    expected = run_with_gradients(leaves, lambda: call(*leaves.values()))
    assert_same(found, expected, 1e-12, smallest=1.0)
    one = {name: x if name == "memory" else x[:, :, :1].detach().requires_grad_() for name, x in leaves.items()}
    found = run_with_gradients(one, lambda: compiled(*one.values()))
    assert_same(found, run_with_gradients(one, lambda: call(*one.values())), 1e-12, smallest=1.0)
    assert graphs == [["fw_fairseq.loop"], []]


@pytest.mark.parametrize("rule, stepwise", [("", True), ("fwm", True), ("fwm", False)])
def test_opcheck_of_steps(rule, stepwise):
    shape = (2, 2, 5, 4, 3)
    q, k, v = draw_inputs(shape).values()
    memory, gates = draw_state(RULES[rule or "delta"], shape).memory, draw_gates(RULES[rule or "delta"], shape)
    masks = [torch.rand(2, 5) < 0.3 for _ in range(2)] if rule else [None, None]
    inputs = rule, stepwise, "beta" if rule else "e", q, k, v, [*gates.values()], memory, *masks
    torch.library.opcheck(torch.ops.fw_fairseq.loop.default, inputs)


@pytest.mark.parametrize("used", [0, 1], ids=["y", "memory"])
def test_gradients_of_the_operator_where_one_result_is_used(used):
    inputs, gates = draw_inputs(SHAPE), draw_gates(RULES["gated_delta"], SHAPE)
    leaves = [*inputs.values(), *gates.values()][0 if used == 0 else 1 :]  # the memory does not read q

    def call(*leaves):
        y, state = fast_weight(*inputs.values(), "gated_delta", gates)
        return (y, state.memory)[used].square().sum()

    torch.compiler.reset()
    found = torch.autograd.grad(torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves), leaves)
    for one, other in zip(found, torch.autograd.grad(call(*leaves), leaves)):
        torch.testing.assert_close(one, other)


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("rule, length", [("delta", SHAPE[2]), ("kda", 40)])
def test_an_exported_operation_needs_nothing_of_this_project(rule, length):
    shape = (*SHAPE[:2], length, *SHAPE[3:])
    gates = draw_gates(RULES[rule], shape, torch.float32)

    class Operation(torch.nn.Module):
        def forward(self, q, k, v, *parts):
            return fast_weight(q, k, v, rule, dict(zip(gates, parts)))[0]

    inputs = [*draw_inputs(shape, torch.float32).values(), *gates.values()]
    program = torch.export.export(Operation(), tuple(inputs), strict=False)
    assert not [node for node in program.graph.nodes if "fw_fairseq" in str(node.target)]
    torch.testing.assert_close(program.module()(*inputs), Operation()(*inputs))


def test_a_state_holds_no_other_tokens():
    inputs = draw_inputs((1, 1, 500, 4, 4), positive=True)
    _, state = fast_weight(**inputs, rule="delta", gates={"beta": torch.rand(1, 1, 500)}, attention_norm=True)
    assert all(x.untyped_storage().nbytes() == x.nbytes for x in state if x is not None)


def test_delta_attention_norm_is_the_papers():
    """Eq. 24 to 28 written out, one step after the other."""
    q, k, v = (x[0, 0].detach() for x in draw_inputs((1, 1, 12, 4, 3), positive=True).values())
    beta = torch.rand(12, dtype=torch.float64)
    memory, n, outputs = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64), []
    for t in range(12):
        recalled = memory @ k[t] / (n @ k[t] + 1e-6) if t else torch.zeros(3, dtype=torch.float64)
        memory = memory + beta[t] * torch.outer(v[t] - recalled, k[t])
        n = n + k[t]
        outputs.append(memory @ q[t] / (n @ q[t] + 1e-6))
    y, _ = fast_weight(*(x[None, None] for x in (q, k, v)), "delta", {"beta": beta[None, None]}, attention_norm=True)
    torch.testing.assert_close(y[0, 0], torch.stack(outputs))


@pytest.mark.parametrize("rule", RULES)
def test_state_moves_as_a_whole_and_never_grows(rule):
    attention_norm = rule in NORMALISED
    state, sizes = None, set()
    for _ in range(6):
        inputs, gates = draw_inputs((3, 2, 1, 4, 5), positive=True), draw_gates(RULES[rule], (3, 2, 1, 4, 5))
        _, state = fast_weight(*inputs.values(), rule, gates, state, attention_norm=attention_norm)
        sizes.add(tuple(x.shape for x in state if x is not None))
    assert len(sizes) == 1
    assert state.index_select(torch.arange(3)) is state
    first = state.index_select(torch.arange(2))  # 2 of 3 sequences, of 2 heads
    assert all(torch.equal(a, b[:2]) for a, b in zip(first, state) if b is not None)
    picked = state.index_select(torch.tensor([2, 0, 0, 1]))
    assert all(torch.equal(a, b[[2, 0, 0, 1]]) for a, b in zip(picked, state) if b is not None)
    assert state.memory.requires_grad and not state.detach().memory.requires_grad


def test_one_token_runs_no_chunk_machinery(monkeypatch):
    from fw_fairseq.ops.chunkwise import scan as chunkwise

    monkeypatch.setattr(chunkwise.ChunkScan, "apply", lambda *args: pytest.fail("one token went through the chunk form"))
    for rule in RULES:
        shape = (1, 1, 1, 4, 4)
        fast_weight(*draw_inputs(shape).values(), rule, draw_gates(RULES[rule], shape))


@pytest.mark.parametrize("rule", [name for name in RULES if RULES[name].step is None])
def test_two_tokens_run_as_a_chunk(rule, monkeypatch):
    from fw_fairseq.ops.chunkwise import scan as chunkwise

    apply, called = chunkwise.ChunkScan.apply, []
    monkeypatch.setattr(chunkwise.ChunkScan, "apply", lambda *args: called.append(args) or apply(*args))
    writes = 2 if RULES[rule].several else 1
    shape = (1, 1, 2 * writes, 4, 4)
    q, k, v = draw_inputs(shape).values()
    y, _ = fast_weight(q[:, :, ::writes], k, v, rule, draw_gates(RULES[rule], shape))
    assert y.shape == (1, 1, 2, 4) and len(called) == 1


@pytest.mark.parametrize("dtype, backend", zip(HALF, ["recurrent", "chunkwise"]))
@pytest.mark.parametrize("rule, attention_norm", [(r, n) for r, n in CHUNKED_CASES if RULES[r].bonus is None])
def test_16_bit_outputs_are_rounded_once(rule, attention_norm, dtype, backend):
    """They are those of the same numbers in fp32, rounded."""
    inputs = {name: x.detach() for name, x in draw_inputs(SHAPE, dtype, positive=attention_norm).items()}
    call = dict(rule=rule, gates=draw_gates(RULES[rule], SHAPE, torch.float32), backend=backend, attention_norm=attention_norm)
    with torch.no_grad():
        y, _ = fast_weight(**inputs, **call)
        want, _ = fast_weight(**{name: x.float() for name, x in inputs.items()}, **call)
    assert (y == want.to(dtype)).double().mean() > 0.99


def test_saved_memory_does_not_hold_every_state():
    """What decay keeps for its backward: the inputs and one memory per 32 tokens, not one per token."""
    T, K, V = 512, 16, 16
    inputs, gates = draw_inputs((1, 1, T, K, V), torch.float32), draw_gates(RULES["decay"], (1, 1, T, K, V), torch.float32)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        fast_weight(*inputs.values(), "decay", gates)
    floats = sum(x.numel() for x in kept.values())
    assert floats <= 5 * T * K + T * K * V / 32


def test_a_new_rule_gets_everything(monkeypatch):
    """One entry, here a leaky rule with a learned write strength, has both forms, states, padding, gradients, normalisation."""
    leaky = Rule(
        equation="W_t = c_t W_{t-1} + w_t k_t v_t^T",
        source="this test",
        gates={"c": Gate(), "strength": Gate()},
        coefficients=lambda c, strength: Coefficients(f=0.5 + 0.5 * c, w=strength),
        normaliser="write",
    )
    keyed = Rule(
        equation="decay per key channel, then the delta write",
        source="this test",
        gates={"f": Gate("K"), "beta": Gate()},
        coefficients=lambda f, beta: Coefficients(f=f, e=beta, w=beta),
    )
    monkeypatch.setitem(RULES, "leaky", leaky)
    monkeypatch.setitem(RULES, "keyed", keyed)
    compare("leaky", SHAPE, FLOAT64, attention_norm=True, with_state=True, padding=True)
    compare("keyed", SHAPE, FLOAT64, with_state=True, padding=True)
    compare("keyed", SHAPE, GATE64, with_state=True, extreme=True)
    test_any_cut_gives_the_same("leaky", True, [7, 33])
    test_gradcheck("leaky", "chunkwise")
    test_gradcheck("keyed", "chunkwise")


def test_scales_of_keys_beside_gates_per_channel(monkeypatch):
    """The scale falls with the channel that keeps most."""
    channels = Rule(
        equation="", source="", gates={"f": Gate("K")}, coefficients=lambda f: Coefficients(f=f), normaliser="write"
    )  # fmt: skip
    monkeypatch.setitem(RULES, "channels", channels)
    test_key_log_scale("channels")
    test_a_scale_does_not_outlive_its_keys("channels", "auto")


def test_gates_of_values_alone(monkeypatch):
    values = Rule(equation="", source="", gates={"z": Gate("V")}, coefficients=lambda z: Coefficients(z=z))
    monkeypatch.setitem(RULES, "values", values)
    compare("values", SHAPE, FLOAT64, with_state=True)
    compare("values", SHAPE, FLOAT32, dtype=torch.float32, with_state=True)
    test_gates_exactly_zero_and_one("values")


def test_value_decay_with_erase_runs_stepwise(monkeypatch):
    both = Rule(
        equation="",
        source="this test",
        gates={"z": Gate("V"), "beta": Gate()},
        coefficients=lambda z, beta: Coefficients(z=z, e=beta, w=beta),
    )
    monkeypatch.setitem(RULES, "both", both)
    inputs, gates = draw_inputs(SHAPE), draw_gates(both, SHAPE)
    fast_weight(*inputs.values(), "both", gates)
    with pytest.raises(ValueError, match="no chunk form"):
        fast_weight(*inputs.values(), "both", gates, backend="chunkwise")


@pytest.mark.parametrize("backend", ["recurrent", "auto"])
@pytest.mark.parametrize("rule, attention_norm", CASES)
def test_autocast_does_not_lower_the_accumulation(rule, attention_norm, backend):
    q, k, v = (x.detach().float() for x in draw_inputs(SHAPE, positive=attention_norm).values())
    gates = draw_gates(RULES[rule], SHAPE, torch.float32)
    want, _ = fast_weight(q, k, v, rule, gates, None, backend, attention_norm)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, state = fast_weight(q, k, v, rule, gates, None, backend, attention_norm)
    assert torch.equal(got, want) and state.memory.dtype == torch.float32


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_smallest_gates_that_run_in_fp32(share):
    """Per-channel gates of SMALLEST_FP32_GATE, all or half of them: the products of a half chunk still fit fp32. A gate's gradient
    loses the rounding of the terms whose difference it is, over the gate."""
    shape = (1, 2, 192, 5, 4)
    q, k, v = draw_inputs(shape, torch.float32).values()
    gates = {"f": torch.rand(*shape[:3], 5), "z": torch.rand(*shape[:3], 4)}
    gates = {n: torch.where(g < share, SMALLEST_FP32_GATE, 1 - SMALLEST_FP32_GATE).requires_grad_() for n, g in gates.items()}
    operands = (q, k, v, gates["f"], gates["z"], None, None)
    assert {way for _, way in plan(operands, torch.float32)} == {LargeChannelGates}

    def results(dtype, backend):
        leaves = {n: x.detach().to(dtype).requires_grad_() for n, x in ({"q": q, "k": k, "v": v} | gates).items()}
        inputs = [leaves.pop(n) for n in "qkv"]
        everything = dict(zip("qkv", inputs)) | leaves
        return run_with_gradients(everything, lambda: fast_weight(*inputs, "decay", leaves, backend=backend))

    assert_same(results(torch.float32, "chunkwise"), results(torch.float64, "recurrent"), 2e-4, smallest=1.0)


def test_strengths_of_writes_beside_gates_of_all_channels(monkeypatch):
    """In fp32, where no gate is small."""
    rule = Rule(
        equation="", source="", gates={"f": Gate("K"), "z": Gate("V"), "w": Gate()},
        coefficients=lambda f, z, w: Coefficients(f=f, z=z, w=w),
    )  # fmt: skip
    monkeypatch.setitem(RULES, "written", rule)
    compare("written", SHAPE, FLOAT32, dtype=torch.float32, with_state=True)


def test_plan_covers_every_token_once():
    """Chunks in fp32 where their gates allow, in float64 where one does not, and for the rest of an odd length."""
    shape = (1, 1, 163, 2, 2)
    q, k, v = draw_inputs(shape, torch.float32).values()
    f, z = torch.full((1, 1, 163, 2), 0.5), torch.full((1, 1, 163, 2), 0.5)
    z[0, 0, 40, 1] = 1e-5
    chunks = plan((q, k, v, f, z, None, None), torch.float32)
    assert [t for span, _ in chunks for t in range(span.start, span.stop)] == list(range(163))
    assert [way for _, way in chunks] == [
        LargeChannelGates,
        ChannelGates,
        LargeChannelGates,
        LargeChannelGates,
        LargeChannelGates,
        ChannelGates,
    ]
    assert {way for _, way in plan((q, k, v, f, z, None, None), torch.float64)} == {ChannelGates}
    assert {way for _, way in plan((q, k, v, f[..., 0], None, None, None), torch.float32)} == {TokenGates}


@pytest.mark.parametrize("rule, attention_norm", CASES)
@pytest.mark.parametrize("backend", ["recurrent", "auto"])
def test_reset_starts_a_new_text(rule, attention_norm, backend):
    """A reset in the middle gives what the two texts give by themselves, in outputs, state and gradients."""
    shape, cut = (2, 2, 75, 4, 3), 41
    inputs, gates = draw_inputs(shape, positive=attention_norm), draw_gates(RULES[rule], shape)
    mask = torch.zeros(shape[0], shape[2], dtype=torch.bool)
    mask[:, cut] = True
    options = dict(attention_norm=attention_norm, backend=backend)

    def joined():
        return fast_weight(*inputs.values(), rule, gates, reset_mask=mask, **options)

    def apart():
        pieces = [(slice(0, cut)), slice(cut, None)]
        results = [
            fast_weight(*(x[:, :, s] for x in inputs.values()), rule, {n: g[:, :, s] for n, g in gates.items()}, **options)
            for s in pieces
        ]
        return torch.cat([y for y, _ in results], dim=2), results[1][1]

    actual, expected = (run_with_gradients(inputs | gates, call) for call in (joined, apart))
    assert_same(actual, expected, FLOAT64)


@pytest.mark.cases_in_ci(2)
@pytest.mark.slow
@pytest.mark.parametrize("rule", [name for name in CHUNKED if name in PLAIN])
@torch.no_grad()
def test_a_long_stream_does_not_drift(rule):
    """In fp32, carried from call to call, against float64: rounding, which does not grow where something is forgotten or erased."""
    states, errors = {torch.float32: None, torch.float64: None}, []
    shape = (1, 1, 4096 if RULES[rule].coefficients else 1024, 4, 4)  # a rule with a step takes a hundred times as long
    for _ in range(16):
        inputs, gates, outputs = draw_inputs(shape), draw_gates(RULES[rule], shape), []
        for dtype, state in states.items():
            given = {name: x.to(dtype) for name, x in inputs.items()}
            y, states[dtype] = fast_weight(**given, rule=rule, gates={n: g.to(dtype) for n, g in gates.items()}, state=state)
            outputs.append(y[:, :, -64:].double())
        errors.append(float((outputs[0] - outputs[1]).abs().max() / outputs[1].abs().max()))
    assert max(errors) < {"sum": 1e-4, "fwm": 4e-6}.get(rule, 2e-6)  # fwm normalises what it reads
