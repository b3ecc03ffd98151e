"""A memory that a reset or a gate of exactly 0 empties is empty: in outputs, states and gradients, in every form."""

from __future__ import annotations

import pytest
import torch
from support.definitions import READS, WRITES
from support.draws import FITTING, NORMALISED, assert_same, draw_gates, draw_inputs

from fw_fairseq.ops import fast_weight
from fw_fairseq.ops.chunkwise.frames import (
    ChannelGates,
    ChannelGatesWithZeros,
    NearGates,
    TokenGates,
    TokenGatesWithZeros,
)
from fw_fairseq.ops.chunkwise.large_gates import LargeChannelGates
from fw_fairseq.ops.chunkwise.scan import plan
from fw_fairseq.ops.chunkwise.single import SingleTokens
from fw_fairseq.rules import RULES

pytestmark = pytest.mark.quick

SHAPE = (2, 2, 100, 6, 5)
TEXTS = (0, 37, 38, 70)  # where the texts after the first begin, in the second sequence; two within a chunk
EMPTYING = {"gated": "g", "gated_delta": "g", "decay": "f"}


def loops(rule, q, k, v, gates, attention_norm, resets):
    """The equations token by token in float64; ``resets`` (B,T)."""
    q, k, v = (x.double() for x in (q, k, v))
    gates = {n: g.double() for n, g in gates.items()}
    outputs = []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            memory, n = q.new_zeros(k.shape[3], v.shape[3]), q.new_zeros(k.shape[3])
            for t in range(q.shape[2]):
                q_t, k_t, v_t = (x[b, h, t] for x in (q, k, v))
                g = {name: x[b, h, t] for name, x in gates.items()}
                if resets[b, t]:
                    memory, n = torch.zeros_like(memory), torch.zeros_like(n)
                before = memory
                if not attention_norm or rule != "delta":
                    memory = WRITES[rule](memory, k_t, v_t, **g)
                    n = WRITES[rule](n[:, None], k_t, v_t.new_ones(1), **g)[:, 0] if attention_norm else n
                else:
                    recalled, known = memory.mT @ k_t, n @ k_t
                    recalled = recalled / (known + 1e-6) if known != 0 else torch.zeros_like(recalled)
                    memory, n = memory + g["beta"] * torch.outer(k_t, v_t - recalled), n + k_t
                y = READS[rule](before, memory, q_t, k_t, v_t, **g) if rule in READS else memory.mT @ q_t
                outputs.append(y / (n @ q_t + 1e-6) if attention_norm else y)
    return torch.stack(outputs).unflatten(0, q.shape[:3])


def with_gradients(leaves, y):
    adjoint = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(y.dtype)
    grads = torch.autograd.grad(y, list(leaves.values()), adjoint, allow_unused=True)
    return {"y": y.detach()} | {n: g for n, g in zip(leaves, grads) if g is not None}


def resets_at(*tokens):
    mask = torch.zeros(SHAPE[0], SHAPE[2], dtype=torch.bool)
    mask[1, list(tokens)] = True
    mask[0, 50] = True
    return mask


def draw(rule, dtype, attention_norm):
    """Keys of which some are all 0, as ReLU and DPFP give them, the first of a text too."""
    inputs = draw_inputs(SHAPE, dtype, positive=attention_norm)
    k = inputs["k"].detach().clone()
    k[:, :, 38:40] = k[:, :, 50] = 0
    return inputs | {"k": k.requires_grad_()}, draw_gates(RULES[rule], SHAPE, dtype)


@pytest.mark.parametrize("rule, attention_norm", [(r, n) for r in FITTING for n in (False, True) if not n or r in NORMALISED])
@pytest.mark.parametrize("backend, dtype, tolerance", [("recurrent", torch.float64, 1e-10), ("chunkwise", torch.float32, 5e-5)])
def test_resets_against_the_equations(rule, attention_norm, backend, dtype, tolerance):
    inputs, gates = draw(rule, dtype, attention_norm)
    leaves, resets = inputs | gates, resets_at(*TEXTS)
    y, _ = fast_weight(**inputs, rule=rule, gates=gates, backend=backend, attention_norm=attention_norm, reset_mask=resets)
    want = with_gradients(leaves, loops(rule, *inputs.values(), gates, attention_norm, resets))
    assert_same(with_gradients(leaves, y), want, tolerance)


@pytest.mark.parametrize("backend", ["recurrent", "chunkwise"])
@pytest.mark.parametrize("rule, attention_norm", [(r, n) for r in FITTING for n in (False, True) if not n or r in NORMALISED])
def test_nothing_passes_a_reset(rule, attention_norm, backend):
    """Not a bit, neither of values a billion times as large nor of gradients."""
    inputs, gates = draw(rule, torch.float32, attention_norm)
    resets = resets_at(37, 70)
    inputs["v"] = (inputs["v"].detach() * torch.where(torch.arange(SHAPE[2]) < 37, 1e9, 1.0)[:, None]).requires_grad_()

    def last_text(x):
        return x[1:, :, 70:]

    options = dict(backend=backend, attention_norm=attention_norm)
    y, state = fast_weight(**inputs, rule=rule, gates=gates, reset_mask=resets, **options)
    alone = {n: last_text(x) for n, x in inputs.items()}
    want, final = fast_weight(**alone, rule=rule, gates={n: last_text(g) for n, g in gates.items()}, **options)
    torch.testing.assert_close(last_text(y), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state.memory[1:], final.memory, rtol=1e-4, atol=1e-5)
    grads = torch.autograd.grad(last_text(y).sum() + state.memory[1].sum(), [*inputs.values(), *gates.values()], allow_unused=True)
    for grad in grads:
        assert (grad[1, :, :70] == 0).all() and (grad[0] == 0).all()


@pytest.mark.parametrize("rule", ["sum", "gated"])
@pytest.mark.parametrize("backend", ["recurrent", "chunkwise"])
def test_an_empty_read_after_a_long_text_is_zero(rule, backend):
    tokens = 2001
    k, q = torch.rand(2, 1, 1, tokens, 8)
    k[:, :, -1] = 0
    resets = torch.zeros(1, tokens, dtype=torch.bool)
    resets[:, -1] = rule == "sum"
    gates = {"g": torch.full((1, 1, tokens), 0.9999).index_fill(2, torch.tensor([tokens - 1]), 0.0)} if rule == "gated" else {}
    y, _ = fast_weight(q, k, torch.full((1, 1, tokens, 4), 5.0), rule, gates, None, backend, True, reset_mask=resets)
    assert (y[:, :, -1] == 0).all() and (y[:, :, -2] - 5).abs().max() < 1e-3


@pytest.mark.parametrize("zeros", ["tokens", "channels", "both sides"])
@pytest.mark.parametrize("rule", EMPTYING)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 5e-5)])
def test_gates_of_zero_and_their_gradients(rule, zeros, dtype, tolerance):
    """Against the equations, the gates' own gradients at 0 too."""
    inputs, gates = draw(rule, dtype, False)
    gates = {n: g.detach().clone() for n, g in gates.items()}
    for name in gates.keys() - {"beta"} if zeros == "both sides" else [EMPTYING[rule]]:
        gate = gates[name]
        if zeros == "channels" and gate.dim() == 4:
            gate[torch.rand(gate.shape) < 0.1] = 0
        else:
            gate[1, :, list(TEXTS)] = gate[0, :, 50] = 0
    gates = {n: g.requires_grad_() for n, g in gates.items()}
    leaves, none = inputs | gates, torch.zeros(SHAPE[0], SHAPE[2], dtype=torch.bool)
    y, _ = fast_weight(**inputs, rule=rule, gates=gates, backend="chunkwise")
    want = with_gradients(leaves, loops(rule, *inputs.values(), gates, False, none))
    assert_same(with_gradients(leaves, y), want, tolerance)


@pytest.mark.parametrize("rule", ["gated", "gated_delta"])
def test_the_smallest_gate_in_a_chunk_with_one_of_zero(rule):
    """Its gradient too, in fp32, where 1e-9 is a little less than 1e-9."""
    inputs, gates = draw(rule, torch.float32, False)
    gates["g"].data[1, :, 37], gates["g"].data[1, :, 45] = 0, 1e-9
    leaves, none = inputs | gates, torch.zeros(SHAPE[0], SHAPE[2], dtype=torch.bool)
    y, _ = fast_weight(**inputs, rule=rule, gates=gates, backend="chunkwise")
    want = with_gradients(leaves, loops(rule, *inputs.values(), gates, False, none))
    assert_same(with_gradients(leaves, y), want, 5e-5)


def test_zeros_on_the_value_side():
    inputs, gates = draw("decay", torch.float64, False)
    gates = {n: g.detach().clone() for n, g in gates.items()}
    gates["z"][1, :, list(TEXTS)] = 0
    gates = {n: g.requires_grad_() for n, g in gates.items()}
    leaves, none = inputs | gates, torch.zeros(SHAPE[0], SHAPE[2], dtype=torch.bool)
    y, _ = fast_weight(**inputs, rule="decay", gates=gates, backend="chunkwise")
    want = with_gradients(leaves, loops("decay", *inputs.values(), gates, False, none))
    assert_same(with_gradients(leaves, y), want, 1e-10)


def test_a_gate_of_zero_forgets_the_scale():
    """Keys of a text 300 nats smaller than those before it."""
    inputs, _ = draw("gated", torch.float32, True)
    q, k, v = inputs.values()
    scale, g = torch.zeros(SHAPE[:3]), torch.full(SHAPE[:3], 0.5)
    scale[:, :, 60:], g[:, :, 60] = -300, 0
    for backend in ("recurrent", "chunkwise"):
        y, _ = fast_weight(q, k, v, "gated", {"g": g}, None, backend, True, key_log_scale=scale)
        want, _ = fast_weight(*(x[:, :, 60:] for x in (q, k, v)), "gated", {"g": g[:, :, 60:]}, None, backend, True)
        torch.testing.assert_close(y[:, :, 60:], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gate, fall", [(1e-6, 13.8155), (1e-9, 20.7233), (1e-12, 20.7233)])
def test_how_far_one_token_lets_the_scale_fall(gate, fall):
    """To the log of its gate, but of no gate below 1e-9 other than 0. The memory stands for the same."""
    q, k, v = (x[:, :, :2].detach() for x in draw_inputs(SHAPE, positive=True).values())
    g = torch.tensor([0.5, gate], dtype=torch.float64).expand(*SHAPE[:2], 2)
    scale = torch.tensor([0.0, -100.0], dtype=torch.float64).expand(*SHAPE[:2], 2)
    _, state = fast_weight(q, k, v, "gated", {"g": g}, attention_norm=True, key_log_scale=scale)
    assert state.log_scale.numpy() == pytest.approx(-fall, abs=1e-4)
    left = state.memory * state.log_scale.exp()[..., None, None] / gate
    torch.testing.assert_close(left, 0.5 * k[:, :, :1].mT @ v[:, :, :1])


def test_chunks_without_zeros_run_as_before():
    f, z = torch.full((1, 1, 96, 2), 0.5), torch.full((1, 1, 96, 2), 0.5)
    q = torch.zeros(1, 1, 96, 2)

    def ways(f, z=None, dtype=torch.float32, tokens=96):
        given = (None if x is None else x[:, :, :tokens] for x in (q, q, q, f, z, None, None))
        return [way for _, way in plan([*given], dtype)]

    assert ways(f, z, tokens=80) == [LargeChannelGates, LargeChannelGates, ChannelGates]
    assert ways(f, z, torch.float64) == ways(f, None, torch.float64) == [ChannelGates] * 3
    limits = {(0.0625, 0.9): NearGates, (0.0624, 0.9): ChannelGates, (0.18, 0.18): NearGates, (0.17, 0.17): ChannelGates}
    for (smallest, others), way in limits.items():
        gates = torch.cat((torch.full((1, 1, 1, 2), smallest), torch.full((1, 1, 31, 2), others)), 2)
        assert ways(gates, tokens=32) == [way]

    def same(gate):
        return torch.full((1, 1, 32, 2), gate)

    assert ways(same(1 / 16), tokens=16) == [NearGates]
    assert ways(same(1e-3), same(1e-3), tokens=32) == [LargeChannelGates]
    assert ways(same(1e-3), same(9e-4), tokens=32) == [ChannelGates]
    assert ways(same(1e-9)[..., 0], tokens=32) == [TokenGates]
    assert ways(same(9e-10)[..., 0], tokens=32) == [TokenGatesWithZeros]
    f[:, :, 40] = 0
    assert ways(f[..., 0]) == [TokenGates, TokenGatesWithZeros, TokenGates]
    assert ways(f[..., 0], z) == [ChannelGates, ChannelGatesWithZeros, ChannelGates]
    assert ways(f, z) == [LargeChannelGates, ChannelGatesWithZeros, LargeChannelGates]
    z[:, :, 40] = 0
    f[:, :, 70, 1] = 0
    assert ways(f, z) == [LargeChannelGates, SingleTokens, SingleTokens]
    assert ways(f) == [NearGates, ChannelGatesWithZeros, SingleTokens]


def test_the_first_scale_of_keys_is_no_gate_of_zero(monkeypatch):
    """There was nothing for it to shrink, and a chunk with a gate of 0 would take longer."""
    seen = []
    monkeypatch.setattr("fw_fairseq.ops.chunkwise.scan.plan", lambda *given: seen.append(plan(*given)) or seen[-1])
    q, k, v = draw_inputs(SHAPE, torch.float32, positive=True).values()
    fast_weight(q, k, v, "sum", {}, None, "chunkwise", True, key_log_scale=torch.zeros(SHAPE[:3]))
    assert [[way for _, way in chunks] for chunks in seen] == [[TokenGates] * 4]
