"""The CUDA backend around its kernels: dispatch, operators, precision, errors. A family of plain PyTorch stands in for kernels."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from support.draws import NORMALISED, assert_same, draw_gates, draw_inputs, draw_state, run_with_gradients
from support.kernel_rules import KERNEL_RULES

from fw_fairseq.feature_maps import AS_IS, ROW_MAPS, Numbered, RowMap
from fw_fairseq.ops import FastWeightState, fast_weight
from fw_fairseq.ops.chunkwise.scan import chunk_form
from fw_fairseq.ops.kernels import recurrence
from fw_fairseq.ops.kernels.compiler import look_up
from fw_fairseq.ops.kernels.family import Family
from fw_fairseq.ops.kernels.launch import log_once
from fw_fairseq.rules import RULES, Coefficients

NAMES = ("q", "k", "v", "f", "z", "e", "w", "memory")
SHAPE = (2, 2, 37, 6, 5)
NOT_DIVIDED = (None, 0.0, 0.0)
KINDS = ("f per token", "f per channel", "z per channel", "e per token", "w per token")


def supported(x):
    assert x.q.dtype == x.k.dtype == x.v.dtype
    return "backend='cuda' has no kernel for keys wider than 8" if x.q.shape[-1] > 8 else None


def saved_like(x):
    return [(x.memory_shape, torch.float32)]


def start_of(x):
    return torch.zeros(x.memory_shape) if x.memory is None else x.memory


def forward(launcher, x, keep):
    PRECISIONS.append(x.precision)
    ROWS.append(x.q.shape[0])
    y, final = chunk_form(x.row_map(x.q), x.row_map(x.k), x.v, Coefficients(*x[3:7]), start_of(x))
    return y, final.contiguous(), (start_of(x) + 1,) if keep else ()


def backward(launcher, x, saved, dy, dmemory):
    assert torch.equal(saved[0], start_of(x) + 1) and len(saved) == 1
    inputs = [None if part is None else part.detach().requires_grad_() for part in (*x[:7], start_of(x))]
    dmemory = torch.zeros(x.memory_shape) if dmemory is None else dmemory
    with torch.enable_grad():
        outputs = chunk_form(x.row_map(inputs[0]), x.row_map(inputs[1]), inputs[2], Coefficients(*inputs[3:7]), inputs[7])
        grads = iter(torch.autograd.grad(outputs, [x for x in inputs if x is not None], (dy, dmemory)))
    found = [None if x is None else torch.empty_like(x).copy_(next(grads)) for x in inputs]
    return (*found[:7], None if x.memory is None else found[7])


PRECISIONS: list[str] = []
ROWS: list[int] = []


@pytest.fixture
def stand_in(emulate, monkeypatch):
    """A family for all rules."""
    monkeypatch.setitem(recurrence.FAMILIES, "all", Family(KINDS, (), supported, saved_like, forward, backward))
    monkeypatch.setattr(recurrence, "find_family", lambda coefficients: "all")
    PRECISIONS.clear()
    ROWS.clear()
    return emulate()


def operands(rule: str, shape=SHAPE, dtype=torch.float32):
    q, k, v = draw_inputs(shape, dtype).values()
    coefficients = RULES[rule].coefficients(**draw_gates(RULES[rule], shape, torch.float32))
    leaves = [None if c is None else c.detach().requires_grad_() for c in coefficients]
    return [q, k, v, *leaves, torch.randn(*shape[:2], *shape[3:]).requires_grad_()]


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("rule", KERNEL_RULES)
def test_opcheck(stand_in, rule):
    torch.library.opcheck(torch.ops.fw_fairseq.scan.default, (*operands(rule), *NOT_DIVIDED, "all", "exact", True, True, *AS_IS))
    inputs = [None if x is None else x.detach() for x in operands(rule)]
    torch.library.opcheck(torch.ops.fw_fairseq.scan.default, (*inputs, *NOT_DIVIDED, "all", "exact", False, True, *AS_IS))
    dy, dmemory = torch.randn_like(inputs[2]), torch.randn_like(inputs[7])
    given = (*inputs, [inputs[7] + 1], None, dy, dmemory, *NOT_DIVIDED, "all", "exact", *AS_IS)
    torch.library.opcheck(torch.ops.fw_fairseq.scan_backward.default, given)


def test_opcheck_with_a_map(stand_in):
    q, k, *rest, memory = operands("gated")
    memory = torch.randn(*SHAPE[:2], 4 * SHAPE[3], SHAPE[4]).requires_grad_()
    torch.library.opcheck(
        torch.ops.fw_fairseq.scan.default, (q, k, *rest, memory, *NOT_DIVIDED, "all", "exact", True, True, "dpfp", 2, "sum")
    )


@pytest.mark.parametrize("backend", ["cuda", "auto"])
@pytest.mark.parametrize("rule", KERNEL_RULES)
def test_public_op_equals_chunks(stand_in, rule, backend):
    inputs, gates = draw_inputs(SHAPE, torch.float32), draw_gates(RULES[rule], SHAPE, torch.float32)
    state = draw_state(RULES[rule], SHAPE, torch.float32)

    def results(backend):
        leaves = inputs | gates | {"memory": state.memory}
        call = dict(rule=rule, gates=gates, state=FastWeightState(state.memory), backend=backend)
        return run_with_gradients(leaves, lambda: fast_weight(**inputs, **call))

    expected = results("chunkwise")
    PRECISIONS.clear()
    assert_same(results(backend), expected, 1e-6)
    assert PRECISIONS == ["exact"]


@pytest.mark.parametrize("rule", NORMALISED)
def test_attention_normalised(stand_in, rule):
    """The kernels get v as normalisation makes it, a column wider or in fp32, and q and k in v's type. Sums of keys are two more
    runs, in fp32."""
    q, k, v = (x.detach() for x in draw_inputs(SHAPE, torch.bfloat16, positive=True).values())
    gates = {name: gate.detach() for name, gate in draw_gates(RULES[rule], SHAPE, torch.float32).items()}
    y, _ = fast_weight(q, k, v, rule, gates, backend="cuda", attention_norm=True)
    want, _ = fast_weight(q, k, v, rule, gates, backend="chunkwise", attention_norm=True)
    torch.testing.assert_close(y, want, rtol=1e-2, atol=1e-2)
    sums = ["exact"] * 2 if RULES[rule].normaliser == "keys" else []
    assert PRECISIONS[: len(sums)] == sums and len(PRECISIONS) == len(sums) + 1


@pytest.mark.parametrize("batch, heads", [(0, 2), (2, 0)])
@pytest.mark.parametrize("rule", KERNEL_RULES)
def test_empty_batch(emulate, rule, batch, heads):
    """Outputs, states and gradients without entries, of many tokens and of one."""
    emulate()
    shape = (batch, heads, 37, 6, 5)
    inputs, gates = draw_inputs(shape, torch.float32), draw_gates(RULES[rule], shape, torch.float32)
    y, state = fast_weight(**inputs, rule=rule, gates=gates, backend="cuda")
    leaves = [*inputs.values(), *gates.values()]
    gradients = torch.autograd.grad((y, state.memory), leaves, (torch.ones_like(y), torch.ones_like(state.memory)))
    assert y.shape == (batch, heads, 37, 5) and [g.shape for g in gradients] == [x.shape for x in leaves]
    with torch.no_grad():
        token = {name: x[:, :, :1] for name, x in inputs.items()}
        y, after = fast_weight(**token, rule=rule, gates={n: g[:, :, :1] for n, g in gates.items()}, state=state, backend="cuda")
    assert y.shape == (batch, heads, 1, 5) and after.memory.shape == state.memory.shape


@pytest.mark.parametrize("row_map", [None, RowMap("elu")])
def test_few_long_sequences_run_in_parts(stand_in, monkeypatch, row_map):
    monkeypatch.setattr(stand_in, "blocks", 16, raising=False)
    inputs = {name: x.detach() for name, x in draw_inputs((1, 2, 4200, 3, 2), torch.float32).items()}
    y, state = fast_weight(**inputs, rule="sum", backend="cuda", feature_map=row_map)
    want, end = fast_weight(**inputs, rule="sum", backend="chunkwise", feature_map=row_map)
    assert ROWS == [16, 16]  # from empty memories, and from those that the parts start from
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(state.memory, end.memory, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "rule, gradients, rows",
    [
        ("sum", False, [4, 4]),
        ("sum", True, [4, 4]),
        ("delta", False, [1]),  # three runs over the parts would take longer than one of the whole
        ("delta", True, [4, 4, 4]),
    ],
)
def test_four_parts_of_a_long_sequence(stand_in, monkeypatch, rule, gradients, rows):
    monkeypatch.setattr(stand_in, "blocks", 4, raising=False)
    inputs, gates = draw_inputs((1, 2, 4200, 3, 2), torch.float32), draw_gates(RULES[rule], (1, 2, 4200, 3, 2), torch.float32)
    with torch.set_grad_enabled(gradients):
        fast_weight(**inputs, rule=rule, gates=gates, backend="cuda")
    assert rows == ROWS


@pytest.mark.parametrize("enabled, required, keep", [(True, True, True), (False, True, False), (True, False, False)])
def test_what_is_kept_for_gradients(stand_in, monkeypatch, enabled, required, keep):
    """Nothing where nobody can ask for them: evaluation would pay for memories that it never reads."""
    kept = []

    def forward_seen(launcher, x, keep):
        kept.append(keep)
        return forward(launcher, x, keep)

    monkeypatch.setitem(recurrence.FAMILIES, "all", replace(recurrence.FAMILIES["all"], forward=forward_seen))
    inputs = {name: x.detach().requires_grad_(required) for name, x in draw_inputs(SHAPE, torch.float32).items()}
    with torch.set_grad_enabled(enabled):
        fast_weight(**inputs, rule="sum", backend="cuda")
    assert kept == [keep]


@pytest.mark.parametrize("attention_norm, refused, fused", [(False, False, True), (False, True, False), (True, False, False)])
def test_where_the_map_is_applied(stand_in, monkeypatch, attention_norm, refused, fused):
    """In the kernels, or before them where they do not take it, or where the normaliser of delta needs the features."""
    row_map, seen = RowMap("dpfp", 2, "sum"), []

    def supported(x):
        seen.append(x.row_map)
        return "no such map" if refused and x.row_map == row_map else None

    monkeypatch.setitem(recurrence.FAMILIES, "all", replace(recurrence.FAMILIES["all"], supported=supported))
    inputs, gates = draw_inputs(SHAPE, torch.float32), draw_gates(RULES["delta"], SHAPE, torch.float32)
    call = dict(rule="delta", gates=gates, feature_map=row_map, attention_norm=attention_norm)

    def results(backend):
        return run_with_gradients(inputs | gates, lambda: fast_weight(**inputs, **call, backend=backend))

    assert_same(results("cuda"), results("chunkwise"), 1e-5)
    assert seen[-1] == (row_map if fused else AS_IS)


@pytest.mark.parametrize("rule", ["sum", "gated", "delta"])
def test_padding_under_a_map(stand_in, rule):
    """A map may make something else of 0: padding is neither written nor read, and erases nothing."""
    inputs, gates = draw_inputs(SHAPE, torch.float32), draw_gates(RULES[rule], SHAPE, torch.float32)
    padding = torch.zeros(SHAPE[0], SHAPE[2], dtype=torch.bool)
    padding[:, [0, 20, 21]] = padding[1, -4:] = True
    kept = ~padding[0]
    call = dict(rule=rule, backend="cuda", feature_map=RowMap("elu", norm="sum"))
    y, state = fast_weight(**inputs, gates=gates, padding_mask=padding, **call)
    assert (y.movedim(2, 1)[padding] == 0).all()
    cut, cut_gates = ({name: x[:1, :, kept] for name, x in part.items()} for part in (inputs, gates))
    want, final = fast_weight(**cut, gates=cut_gates, **call)
    torch.testing.assert_close((y[:1, :, kept], state.memory[:1]), (want, final.memory))


def test_nothing_is_said_of_a_map_that_kernels_have_or_that_they_do_not_wait_for(stand_in, monkeypatch, caplog):
    """One that they have may run before them, and one that they lack may not be what keeps them from running."""
    log_once.cache_clear()
    without = replace(recurrence.FAMILIES["all"], supported=lambda x: None if x.row_map == AS_IS else "no map here")
    monkeypatch.setitem(recurrence.FAMILIES, "all", without)
    monkeypatch.setitem(ROW_MAPS, "square", Numbered(None, lambda x, nu: x.square()))
    with caplog.at_level(logging.WARNING):
        fast_weight(**draw_inputs(SHAPE, torch.float32), rule="sum", feature_map=RowMap("elu"))
        assert PRECISIONS == ["exact"] and not caplog.records
        fast_weight(**draw_inputs(SHAPE), rule="sum", feature_map=RowMap("square"))
    [record] = caplog.records
    assert PRECISIONS == ["exact"] and record.message.endswith(", not for torch.float64; running the PyTorch form instead")


@pytest.mark.parametrize("used", ["y", "memory"])
def test_one_output_used(stand_in, used):
    """The gradient of an output that nobody used is zero, not missing."""
    inputs = draw_inputs(SHAPE, torch.float32)

    def gradient(backend):
        y, state = fast_weight(**inputs, rule="sum", backend=backend)
        result = y.sum() if used == "y" else state.memory.square().sum()
        return torch.autograd.grad(result, (inputs["k"], inputs["v"]))

    torch.testing.assert_close(gradient("cuda"), gradient("chunkwise"))


def test_views_and_broadcast_gradients(stand_in):
    """Last dimension strided, gates expanded, a gradient that is one number: what kernels get is dense in the last dimension."""
    q, k, v = (torch.randn(2, 6, 2, 9).mT.transpose(1, 3)[..., :5, :].transpose(1, 2) for _ in range(3))
    q, k, v = (torch.randn(2, 2, 6, 9).mT[:, :, ::2].requires_grad_() for _ in range(3))
    g = torch.rand(1, 1, 5).expand(2, 2, 5)
    assert q.stride(-1) != 1
    y, _ = fast_weight(q, k, v, "gated", {"g": g}, backend="cuda")
    want, _ = fast_weight(q, k, v, "gated", {"g": g}, backend="chunkwise")
    torch.testing.assert_close(torch.autograd.grad(y.sum(), (q, k, v)), torch.autograd.grad(want.sum(), (q, k, v)))


@pytest.mark.parametrize("rule", ["gated", "delta"])
def test_compiled_by_torch(stand_in, rule):
    """One graph, forward and backward, the same numbers."""
    inputs, gates = draw_inputs(SHAPE, torch.float32), draw_gates(RULES[rule], SHAPE, torch.float32)

    def loss(*leaves):
        q, k, v, *rest = leaves
        call = dict(gates=dict(zip(gates, rest)), backend="cuda", feature_map=RowMap("elu", 1, "sum"))
        y, state = fast_weight(q.sin(), k, v, rule, **call)
        return y.square().sum() + state.memory.sum()

    leaves = (*inputs.values(), *gates.values())
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    want, got = loss(*leaves), compiled(*leaves)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, leaves), torch.autograd.grad(want, leaves))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(stand_in, dtype):
    """Inputs keep their dtype under autocast, and 16-bit inputs take 16-bit products."""
    q, k, v = (x.detach() for x in draw_inputs(SHAPE, dtype).values())
    with torch.autocast("cpu", torch.bfloat16):
        y, state = fast_weight(q, k, v, "sum", backend="cuda")
    assert y.dtype == dtype and state.memory.dtype == torch.float32
    assert ["bf16" if dtype == torch.bfloat16 else "fp16"] == PRECISIONS


def test_fp32_precision_by_environment(stand_in, monkeypatch):
    inputs = draw_inputs(SHAPE, torch.float32)
    monkeypatch.setenv("FW_FAIRSEQ_FP32", "tf32")
    fast_weight(**inputs, rule="sum", backend="cuda")
    assert PRECISIONS == ["tf32"]
    monkeypatch.setenv("FW_FAIRSEQ_FP32", "double")
    with pytest.raises(ValueError, match="FW_FAIRSEQ_FP32 is 'double'; allowed: exact, tf32"):
        fast_weight(**inputs, rule="sum", backend="cuda")


def test_what_has_no_kernel(stand_in, caplog):
    """ "cuda" says why in one sentence; "auto" says it once and goes on."""
    wide = draw_inputs((1, 1, 9, 12, 4), torch.float32)
    with pytest.raises(ValueError, match=r"^backend='cuda' has no kernel for keys wider than 8$"):
        fast_weight(**wide, rule="sum", backend="cuda")
    log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            fast_weight(**wide, rule="sum")
    assert [r.message for r in caplog.records].count(
        "backend='cuda' has no kernel for keys wider than 8; running the PyTorch form instead"
    ) == 1
    with pytest.raises(ValueError, match="float64"):
        fast_weight(**draw_inputs(SHAPE), rule="sum", backend="cuda")
    with pytest.raises(ValueError, match="rule 'fwm' has no kernel"):
        fast_weight(**draw_inputs(SHAPE), rule="fwm", gates=draw_gates(RULES["fwm"], SHAPE), backend="cuda")


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    look_up.cache_clear()
    inputs = draw_inputs(SHAPE, torch.float32)
    with pytest.raises(ValueError, match=r"^backend='cuda' needs a CUDA device, and torch sees none$"):
        fast_weight(**inputs, rule="sum", backend="cuda")
    fast_weight(**inputs, rule="sum")
