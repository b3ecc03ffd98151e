"""Decoding's short memories, kept as their factors: the same numbers as the memory, and never larger."""

from __future__ import annotations

import pytest
import torch
from support.draws import CASES, FITTING, assert_same, draw_gates, draw_inputs, run_with_gradients
from torch import Tensor

from fw_fairseq.ops import FastWeightState, fast_weight
from fw_fairseq.ops.factored import Factors
from fw_fairseq.rules import RULES

pytestmark = pytest.mark.quick

K, V, TOKENS = 12, 6, 9  # 4 tokens are smaller as factors
SHAPE = (3, 2, TOKENS, K, V)
TOLERANCE = 1e-10  # float64 sums in another order
FACTORED = [(rule, norm) for rule, norm in CASES if rule in FITTING and RULES[rule].one_step]


def decode(rule, inputs, gates, masks=None, between=lambda state: state, **options):
    """Token by token, ``between`` what happens to the state before each; y, and every state."""
    outputs, states, state = [], [], None
    for t in range(TOKENS):
        at = slice(t, t + 1)
        q, k, v = (x[:, :, at] for x in inputs.values())
        now = {name: x[:, :, at] for name, x in gates.items()}
        timed = {name: x[..., at] for name, x in (masks or {}).items()}
        y, state = fast_weight(q, k, v, rule, now, between(state), decoding=True, **timed, **options)
        outputs.append(y)
        states.append(state)
    return torch.cat(outputs, 2), states


def draw(rule, norm):
    return draw_inputs(SHAPE, positive=norm), draw_gates(RULES[rule], SHAPE)


@pytest.mark.parametrize("rule, norm", FACTORED)
def test_the_same_outputs_states_and_gradients(rule, norm):
    inputs, gates = draw(rule, norm)
    call = dict(attention_norm=norm)
    if norm and RULES[rule].normaliser == "write":
        call["key_log_scale"] = 3 * torch.randn(SHAPE[:3], dtype=torch.float64)
    masks = {"padding_mask": torch.rand(3, TOKENS) < 0.3, "reset_mask": torch.rand(3, TOKENS) < 0.2}

    def whole():
        return fast_weight(*inputs.values(), rule, gates, backend="recurrent", **masks, **call)

    def one_by_one():
        scales = {name: call[name] for name in call if name == "key_log_scale"}
        y, states = decode(rule, inputs, gates, masks | scales, attention_norm=norm)
        assert [isinstance(state.memory, Factors) for state in states] == [True] * 3 + [False] * (TOKENS - 3)
        return y, states[-1]

    leaves = inputs | gates
    assert_same(run_with_gradients(leaves, one_by_one), run_with_gradients(leaves, whole), TOLERANCE)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_continues_from_factors(rule):
    """Also those that never keep them, in the states of calls under another rule."""
    inputs, gates = draw(rule, False)
    factors = Factors(torch.rand(3, 2, 2, K).double(), torch.rand(3, 2, 2, V).double())
    q, k, v, *values = (x[:, :, :1] for x in (*inputs.values(), *gates.values()))
    gates = dict(zip(gates, values))
    want, _ = fast_weight(q, k, v, rule, gates, FastWeightState(factors.keys.mT @ factors.values))
    y, _ = fast_weight(q, k, v, rule, gates, FastWeightState(factors))
    torch.testing.assert_close(y, want, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("rule, norm", FACTORED)
def test_hypotheses_change_places(rule, norm):
    inputs, gates = draw(rule, norm)
    order = torch.tensor([2, 0, 1])
    moved = {name: x.clone() for name, x in (inputs | gates).items()}
    for t in range(TOKENS):  # what each row would have read had it been where it ends up
        for x in moved.values():
            x.data[:, :, :t] = x.data[order, :, :t]
    y, _ = decode(rule, inputs, gates, between=lambda s: s and s.index_select(order), attention_norm=norm)
    q, k, v = (moved[name] for name in "qkv")
    whole, _ = fast_weight(q, k, v, rule, {name: moved[name] for name in gates}, attention_norm=norm)
    torch.testing.assert_close(y[:, :, -1], whole[:, :, -1], rtol=TOLERANCE, atol=TOLERANCE)


def test_never_larger_than_the_memory():
    """Of inputs without gradients, outside of no_grad."""
    inputs, gates = ({name: x.detach() for name, x in part.items()} for part in draw("sum", True))
    _, states = decode("sum", inputs, gates, attention_norm=True)
    sizes = [sum(x.numel() for x in (s.memory if isinstance(s.memory, Factors) else [s.memory])) for s in states]
    assert sizes == [3 * 2 * min(t * (K + V), K * V) for t in range(1, TOKENS + 1)]


def test_gates_of_two_features():
    """They decay keys, which are narrower than the values."""
    shape = (2, 1, TOKENS, 2, 8)
    inputs, gates = draw_inputs(shape), draw_gates(RULES["decay"], shape)
    y, states = decode("decay", inputs, gates)
    whole, last = fast_weight(**inputs, rule="decay", gates=gates, backend="recurrent")
    assert isinstance(states[0].memory, Factors)
    torch.testing.assert_close((y, states[-1].memory), (whole, last.memory), rtol=TOLERANCE, atol=TOLERANCE)


def test_a_longer_piece_and_explicit_backends_have_the_memory_itself():
    inputs, gates = draw("delta", False)
    q, k, v = inputs.values()
    first, rest = ({name: x[:, :, part] for name, x in gates.items()} for part in (slice(0, 1), slice(1, None)))
    y, state = fast_weight(q[:, :, :1], k[:, :, :1], v[:, :, :1], "delta", first, decoding=True)
    y, state = fast_weight(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:], "delta", rest, state, decoding=True)
    whole, final = fast_weight(q, k, v, "delta", gates)
    torch.testing.assert_close(y, whole[:, :, 1:], rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(state.memory, final.memory, rtol=TOLERANCE, atol=TOLERANCE)
    _, state = fast_weight(q, k, v, "delta", gates, decoding=True)
    torch.testing.assert_close(state.memory, final.memory, rtol=TOLERANCE, atol=TOLERANCE)
    one = [x[:, :, :1] for x in (q, k, v)]
    for backend, rule in (("recurrent", "sum"), ("auto", "fwm")):
        now = {name: x[:, :, :1] for name, x in draw_gates(RULES[rule], SHAPE).items()}
        _, state = fast_weight(*one, rule, now, backend=backend, decoding=True)
        assert isinstance(state.memory, Tensor)


def test_detached_factors_have_no_gradient():
    factors = Factors(*(torch.randn(1, 1, 2, width, requires_grad=True) for width in (4, 3)))
    kept = factors.detach()
    assert factors.requires_grad and not kept.requires_grad and torch.equal(kept.dense(), factors.dense())
