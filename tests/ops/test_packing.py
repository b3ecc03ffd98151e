"""Texts packed into one row are what each of them is alone: outputs, states and gradients."""

from __future__ import annotations

import pytest
import torch
from support.draws import NORMALISED, draw_gates, draw_inputs

from fw_fairseq.ops import FastWeightState, RowMap, fast_weight
from fw_fairseq.ops.parallel import packing
from fw_fairseq.rules import RULES

pytestmark = pytest.mark.quick

LENGTHS = 3, 0, 70, 1, 66, 3
LIMITS = torch.tensor([0, *LENGTHS]).cumsum(0)
H, K, V = 2, 5, 3
SHAPE = (1, H, sum(LENGTHS), K, V)


def pieces(x, text: int, tokens: int = SHAPE[2]):
    """What a tensor (1,H,n T,...) or (1,T) has for one text."""
    axis = 2 if x.dim() > 2 else 1
    writes = x.shape[axis] // tokens
    return x.narrow(axis, int(LIMITS[text]) * writes, LENGTHS[text] * writes)


def alone(q, k, v, rule, gates, state=None, **options):
    """Each text by itself, token by token. A text without tokens leaves its state."""
    masks = {name: x for name, x in options.items() if isinstance(x, torch.Tensor)}
    ys, states = [], []
    for text, length in enumerate(LENGTHS):
        before = None if state is None else state.index_select(torch.tensor([text]))
        if not length:
            states.append(before)
            continue
        given = {name: pieces(x, text) for name, x in masks.items()}
        parts = (pieces(x, text) for x in (q, k, v))
        own = {name: pieces(gate, text) for name, gate in gates.items()}
        y, after = fast_weight(*parts, rule, own, before, **options | {"backend": "recurrent"} | given)
        ys.append(y)
        states.append(after)
    empty = next(x for x in states if x is not None)
    states = [empty._map(lambda x: torch.full_like(x, -torch.inf if x.dim() == 2 else 0)) if x is None else x for x in states]
    return torch.cat(ys, 2), FastWeightState.join(states)


def results(run, leaves, *args, **options):
    y, state = run(*args, **options)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    loss = (y * weights).sum() + sum(x.cos().sum() for x in state[:2] if x is not None)
    return [y, *(x for x in state if x is not None), *torch.autograd.grad(loss, leaves, materialize_grads=True)]


def check(rule, state=None, positive=False, writes=1, **options):
    inputs = draw_inputs(SHAPE, positive=positive)
    long = (*SHAPE[:2], writes * SHAPE[2], K, V)
    if writes > 1:
        inputs |= {name: x for name, x in draw_inputs(long).items() if name != "q"}
    gates = draw_gates(RULES[rule], long)
    parts = () if state is None else tuple(x.requires_grad_() for x in state[:2] if x is not None)
    leaves = [*inputs.values(), *gates.values(), *parts]
    packed = results(fast_weight, leaves, *inputs.values(), rule, gates, state, cu_seqlens=LIMITS, **options)
    for one, other in zip(packed, results(alone, leaves, *inputs.values(), rule, gates, state, **options), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule(rule):
    check(rule)
    check(rule, FastWeightState(torch.randn(len(LENGTHS), H, K, V, dtype=torch.float64)))


@pytest.mark.parametrize("rule", NORMALISED)
def test_attention_normalisation(rule):
    check(rule, positive=True, attention_norm=True)
    state = FastWeightState(*(torch.rand(len(LENGTHS), H, K, *more, dtype=torch.float64) for more in ((V,), ())))
    check(rule, state, positive=True, attention_norm=True, eps=1e-3)


def test_options():
    """Several writes, masks within the texts, a feature map and a log scale of the keys."""
    check("delta_product", writes=3)
    tokens = SHAPE[2]
    masks = {"padding_mask": torch.rand(1, tokens) < 0.3, "reset_mask": torch.rand(1, tokens) < 0.2}
    masks["reset_mask"][0, 0] = True  # where the padding of shorter texts looks
    check("gated_delta", FastWeightState(torch.randn(len(LENGTHS), H, K, V, dtype=torch.float64)), **masks)
    check("gated", positive=True, attention_norm=True, key_log_scale=torch.randn(1, H, tokens, dtype=torch.float64) * 9)
    check("sum", feature_map=RowMap("elu", norm="sum"), padding_mask=masks["padding_mask"])


@pytest.mark.parametrize("backend", ["auto", "recurrent", "chunkwise"])
def test_it_is_what_reset_mask_does(backend):
    """From empty memories; the last text's state is that of the row."""
    inputs, gates = draw_inputs(SHAPE, torch.float32), draw_gates(RULES["kda"], SHAPE, torch.float32)
    resets = torch.zeros(1, SHAPE[2], dtype=torch.bool)
    resets[0, LIMITS[:-1]] = True
    packed, states = fast_weight(*inputs.values(), "kda", gates, backend=backend, cu_seqlens=LIMITS.int())
    y, state = fast_weight(*inputs.values(), "kda", gates, backend=backend, reset_mask=resets)
    torch.testing.assert_close(packed, y, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states.memory[-1:], state.memory, rtol=1e-4, atol=1e-5)


def test_little_padding_is_computed(monkeypatch):
    """One call for texts of like length, and nothing is moved where they have one length."""
    seen = []

    def operation(q, k, v, **given):
        seen.append((tuple(q.shape[::2]), given["padding_mask"] is None, q.data_ptr()))
        return fast_weight(q, k, v, **given)

    monkeypatch.setattr("fw_fairseq.ops.operation.run_packed", lambda _, *rest: packing.run_packed(operation, *rest))
    lengths = [300, 5, 298, 7]
    q, k, v = (torch.randn(1, 2, 610, 4) for _ in range(3))
    fast_weight(q, k, v, "sum", cu_seqlens=torch.tensor([0, *lengths]).cumsum(0))
    assert sorted(size for size, *_ in seen) == [(2, 7), (2, 300)] and not any(whole for _, whole, _ in seen)
    seen.clear()
    fast_weight(q, k, v, "sum", cu_seqlens=torch.arange(0, 611, 122))
    assert seen == [((5, 122), True, q.data_ptr())]


def test_texts_of_one_token_go_on():
    """As when tokens of several texts are generated, from memories that are kept as factors."""
    inputs, gates = draw_inputs((4, H, 1, K, V)), draw_gates(RULES["delta"], (4, H, 1, K, V))
    _, state = fast_weight(*inputs.values(), "delta", gates, decoding=True)
    together, after = fast_weight(*inputs.values(), "delta", gates, state)
    row = [x.transpose(0, 2) for x in (*inputs.values(), *gates.values())]
    y, packed = fast_weight(*row[:3], "delta", dict(zip(gates, row[3:])), state, cu_seqlens=torch.arange(5))
    torch.testing.assert_close(y.transpose(0, 2), together)
    torch.testing.assert_close(packed.memory, after.memory.dense() if hasattr(after.memory, "dense") else after.memory)
