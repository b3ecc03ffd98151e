"""SRU++ against its equations in float64: attention over the last tokens by a loop, and a start without attention."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.definitions import by_the_equations

from fw_fairseq.mixers import Srupp

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]


def build(alpha=0.7, **changed):
    options = {"sru_highway_bias": -2.0, "srupp_width": 6, "srupp_heads": 2, "srupp_memory": 4, "srupp_dropout": 0.0} | changed
    mixer = Srupp(8, 1, SimpleNamespace(**options)).double()
    torch.nn.init.constant_(mixer.alpha, alpha)
    return mixer


def attention_by_definition(mixer, z, padding, resets):
    """z (T,B,width): each token over itself and the 4 before it in its text, without padding."""
    keys, values = mixer.kv_proj(z).chunk(2, -1)
    rows = []
    for b in range(z.shape[1]):
        seen, outputs = [], []
        for t in range(z.shape[0]):
            seen = [] if resets[b, t] else seen
            if padding[b, t]:
                outputs.append(z.new_zeros(6))
                continue
            seen = [*seen[-4:], t]
            heads = zip(*(x.chunk(2, -1) for x in (z[t, b], keys[seen, b], values[seen, b])))
            outputs.append(torch.cat([(k @ q / 3**0.5).softmax(0) @ v for q, k, v in heads]))
        rows.append(torch.stack(outputs))
    return torch.stack(rows, 1)


def test_outputs_and_gradients_are_those_of_the_equations():
    mixer, x = build(), torch.randn(15, 3, 8, dtype=torch.float64, requires_grad=True)
    padding, resets = torch.rand(3, 15) < 0.2, torch.rand(3, 15) < 0.2
    y, _ = mixer(x, None, padding, resets)
    z = mixer.down_proj(x)
    inner = mixer.norm(z + mixer.alpha * attention_by_definition(mixer, z, padding, resets))
    scale = (1 + 2 * torch.tensor(-2.0, dtype=torch.float64).exp()) ** 0.5
    start = torch.zeros(3, 8, dtype=torch.float64)
    expected, _ = by_the_equations(mixer.in_proj(inner), x, *mixer.gate_weight, start, padding, resets, scale)
    torch.testing.assert_close(y, expected)
    leaves, adjoint = [x, *mixer.parameters()], torch.randn_like(y)
    gradients = (torch.autograd.grad(out, leaves, adjoint, retain_graph=True) for out in (y, expected))
    torch.testing.assert_close(*gradients)


def test_parts_with_their_state_equal_the_whole():
    mixer, x = build(), torch.randn(15, 3, 8, dtype=torch.float64)
    padding, resets = torch.rand(3, 15) < 0.2, torch.rand(3, 15) < 0.2
    state, outputs = None, []
    for part in torch.arange(15).split([1, 2, 11, 1]):
        y, state = mixer(x[part], state, padding[:, part], resets[:, part])
        outputs.append(y)
        assert [None if s is None else tuple(s.shape) for s in state] == [(3, 8), None, (3, 4), (3, 4, 8), None]
    torch.testing.assert_close(torch.cat(outputs), mixer(x, None, padding, resets)[0])


def test_decoding_keeps_projections():
    """The state then has the size that the log reports; a state of inputs becomes one of projections."""
    mixer, x = build(), torch.randn(9, 3, 8, dtype=torch.float64)
    first, state = mixer(x[:5])
    outputs = [first]
    for t in range(5, 9):
        y, state = mixer(x[t : t + 1], state, decoding=True)
        outputs.append(y)
        assert [None if s is None else tuple(s.shape) for s in state] == [(3, 8), (3, 4, 6), (3, 4), None, None]
    torch.testing.assert_close(torch.cat(outputs), mixer(x)[0])
    assert mixer.state_size() == state.cell[0].numel() + state.memory[0].numel()


def test_it_starts_without_attention():
    config = SimpleNamespace(sru_highway_bias=-2.0, srupp_width=0, srupp_heads=1, srupp_memory=4, srupp_dropout=0.0)
    mixer, x = Srupp(8, 1, config), torch.randn(5, 2, 8)
    assert mixer.alpha.item() == 0 and mixer.down_proj.out_features == 2
    before = mixer(x)[0]
    torch.nn.init.normal_(mixer.kv_proj.weight)
    assert torch.equal(mixer(x)[0], before)


def test_attention_has_a_quarter_of_the_width():
    assert [Srupp(width).down_proj.out_features for width in (2, 7, 8)] == [1, 1, 2]


def test_training_drops_what_the_product_reads():
    mixer, x = build(srupp_dropout=0.5), torch.randn(9, 2, 8, dtype=torch.float64)
    read = []
    mixer.in_proj.register_forward_pre_hook(lambda module, args: read.append(args[0]))
    for training in (False, True):
        mixer.train(training)(x)
    kept = read[1] != 0
    assert 0.2 < kept.double().mean() < 0.8
    torch.testing.assert_close(read[1][kept], 2 * read[0][kept])


def test_heads_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="--srupp-heads is 4; it must divide the width of the attention, 6"):
        build(srupp_heads=4)
