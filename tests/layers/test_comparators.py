"""Attention to a window, Transformer-XL, ABC and Linformer: blocks, masks, states, memory. test_equations.py has the equations."""

from __future__ import annotations

import logging

import pytest
import torch
from support.language_models import build
from torch.utils._python_dispatch import TorchDispatchMode

from fw_fairseq.config import FastWeightConfig
from fw_fairseq.mixers import MIXERS, look_back

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]

WIDTH, HEADS, LENGTH, BATCH = 12, 2, 9, 3


def mixer_of(name: str, **options):
    mixer = MIXERS[name](WIDTH, HEADS, FastWeightConfig(mixer=name, **options)).double()
    for parameter in mixer.parameters():  # biases too
        torch.nn.init.normal_(parameter, std=0.5)
    return mixer


@pytest.mark.parametrize("name", ["local_attention", "transformer_xl", "srupp"])
@pytest.mark.parametrize("masks", ["", "padding", "resets", "padding resets"])
def test_blocks_of_queries_are_all_of_them_at_once(monkeypatch, name, masks):
    """With and without tokens of an earlier segment; outputs, gradients and the next state."""
    mixer, length = mixer_of(name, local_window=4, xl_memory=3, srupp_memory=3, srupp_width=4), 40
    x = torch.randn(length, BATCH, WIDTH, dtype=torch.float64, requires_grad=True)
    padding = torch.rand(BATCH, length) < 0.4 if "padding" in masks else None
    reset = torch.rand(BATCH, length) < 0.1 if "resets" in masks else None
    _, earlier = mixer(torch.randn(2, BATCH, WIDTH, dtype=torch.float64))
    for state in (None, earlier.detach()):
        found = []
        for block in (1000, 5):
            monkeypatch.setattr(look_back, "BLOCK", block)
            y, after = mixer(x, state, padding, reset)
            found.append(
                [y, *(s for s in after if s is not None), *torch.autograd.grad(y.square().sum(), [x, *mixer.parameters()])]
            )
        torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ["local_attention", "transformer_xl", "linformer", "abc", "gsa", "lstm", "fwm_lstm"])
def test_texts_and_padding_keep_to_themselves(name):
    """A reset starts anew; padding on the left is as if it were not there, and leaves the state alone."""
    mixer, x = mixer_of(name, slots=3, slot_positions=6, local_window=4, xl_memory=4), torch.randn(8, 2, WIDTH).double()
    reset, padding = torch.zeros(2, 5, dtype=torch.bool), torch.zeros(2, 5, dtype=torch.bool)
    reset[0, 2], padding[1, :2] = True, True
    _, state = mixer(x[:3])
    y, after = mixer(x[3:], state, padding, reset)
    torch.testing.assert_close(y[2:, :1], mixer(x[5:, :1])[0])
    alone, after_alone = mixer(x[5:, 1:], state.index_select(torch.tensor([1])))
    torch.testing.assert_close(y[2:, 1:], alone)
    again = torch.randn(1, 1, WIDTH).double()
    torch.testing.assert_close(mixer(again, after.index_select(torch.tensor([1])))[0], mixer(again, after_alone)[0])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("with_resets", [False, True])
def test_places_count_the_tokens_of_a_text(padded, with_resets):
    """Padding takes no place; it and a reset may be at the last token, too."""
    padding, resets = (torch.rand(16, LENGTH) < 0.4 if wanted else None for wanted in (padded, with_resets))
    start = torch.arange(16)
    places, end = look_back.places_in_texts(start, LENGTH, padding, resets)
    for row, place in enumerate(start.tolist()):
        for t in range(LENGTH):
            place = 0 if with_resets and resets[row, t] else place
            assert places[row, t] == place
            place += not (padded and padding[row, t])
        assert end[row] == place


def test_what_each_token_sees():
    """The tokens of its text up to two before it, padding left out, and itself; padding sees itself alone."""
    padding, resets = (torch.rand(16, LENGTH) < share for share in (0.4, 0.2))
    everything = slice(0, LENGTH)
    view = look_back.look_back(torch.zeros(16, LENGTH, 1), None, look_back.Reach(2), padding, resets)
    found = view.seen(everything, everything)
    for row in range(16):
        before = []
        for t in range(LENGTH):
            before = [] if resets[row, t] else before
            seen = [*before[-2:], t] if not padding[row, t] else [t]
            assert found[row, t].nonzero().flatten().tolist() == seen
            before = before if padding[row, t] else [*before, t]


@pytest.mark.parametrize("memory", [3, 20])
@pytest.mark.parametrize("name", ["local_attention", "transformer_xl", "srupp"])
def test_padding_of_a_first_segment_is_as_if_it_were_not_there(name, memory):
    """On the left and within; with tokens that are too far back, and where each token sees all before it."""
    mixer = mixer_of(name, local_window=memory + 1, xl_memory=memory, srupp_memory=memory, srupp_width=4)
    x, padding = torch.randn(LENGTH, 2, WIDTH).double(), torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[0, :2] = padding[0, 5] = padding[1, 3:5] = True
    y, _ = mixer(x, None, padding)
    for row, real in enumerate(~padding):
        torch.testing.assert_close(y[real, row], mixer(x[real][:, [row]])[0][:, 0])


@pytest.mark.parametrize("name", ["local_attention", "transformer_xl"])
def test_states_of_decoding_and_of_earlier_versions_continue(name):
    """They hold keys and values, which the next call takes as they are; without segments they are the first two fields."""
    mixer, x = mixer_of(name, local_window=5, xl_memory=4), torch.randn(9, BATCH, WIDTH, dtype=torch.float64)
    _, state = mixer(x[:4])
    assert state.memory is None and state.inputs.shape == (BATCH, 4, WIDTH)
    _, state = mixer(x[4:5], state, decoding=True)
    assert state.inputs is None and state.memory.shape == (BATCH, 4, 2 * WIDTH)
    y, after = mixer(x[5:], mixer.state_type(*state[:2]))
    torch.testing.assert_close(y, mixer(x)[0][5:])
    assert after.memory is not None


def test_exponents_of_any_size_stay_finite():
    mixer, x = mixer_of("abc", slots=3), 1000 * torch.randn(LENGTH, BATCH, WIDTH).double()
    y, _ = mixer.float()(x.float())
    y.sum().backward()
    assert y.isfinite().all() and all(p.grad.isfinite().all() for p in mixer.parameters())
    _, state = mixer(x[:1].float())
    exponents = state.weights.log()
    torch.testing.assert_close(torch.stack([exponents.min(), exponents.max()]), torch.tensor([-20.0, 20.0]))


@pytest.mark.parametrize(
    "options, millions",
    [
        ({"update_rule": "delta", "feature_map": "elu"}, 0.131072),
        ({"mixer": "transformer_xl", "xl_memory": 15}, 0.131072),
        ({"mixer": "transformer_xl", "xl_memory": 64, "xl_segment": 64}, 1.048576),
        ({"mixer": "transformer_xl", "xl_memory": 384, "xl_segment": 384}, 6.291456),
        ({"mixer": "local_attention"}, 0.262144),
        ({"mixer": "abc"}, 16 * (2 * 32 * 256 + 8 * 32) / 1e6),
        ({"mixer": "linformer", "slots": 64}, 16 * 2 * 64 * 256 / 1e6),
    ],
)
def test_state_sizes_are_those_of_table_4(options, millions):
    """Schlag et al. 2021, medium: 0.13 for fast weights and for Transformer-XL with a memory of 15 and segments of 1, 1.05
    for 64 and 64, 6.29 for 384 and 384."""
    sizes = dict.fromkeys(("decoder_embed_dim", "decoder_input_dim", "decoder_output_dim"), 256)
    model = build(decoder_layers=16, decoder_attention_heads=8, **sizes, **options)
    assert model.state_size() == sum(layer.mixer.state_size() for layer in model.decoder.mixers) == pytest.approx(millions * 1e6)
    assert model.describe_state() == f"state size: {millions:.4g} million numbers for a sequence"


def test_the_state_of_a_hybrid_grows_with_its_softmax(caplog):
    """As the log of training says, in which fw-plot looks for it."""
    with caplog.at_level(logging.INFO, "fw_fairseq"):
        model = build(mixer_pattern="softmax,fast_weight")
    assert model.describe_state().endswith("and 64 numbers more with each token")
    assert caplog.messages.count(model.describe_state()) == 1


class Largest(TorchDispatchMode):
    """The most numbers that one result holds."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [x for x in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(x, torch.Tensor)]
        self.numbers = max(self.numbers, *(x.untyped_storage().nbytes() // x.element_size() for x in tensors), 0)
        return result


@pytest.mark.parametrize(
    "name, memory", [("local_attention", "local_window"), ("transformer_xl", "xl_memory"), ("srupp", "srupp_memory")]
)
@pytest.mark.parametrize("padded", [False, True])
def test_attention_to_the_last_tokens_takes_memory_for_each_token_not_for_each_pair(name, memory, padded):
    length, seen = 3000, 20
    mixer = MIXERS[name](WIDTH, HEADS, FastWeightConfig(**{memory: seen}))
    x, padding = torch.randn(length, 2, WIDTH, requires_grad=True), torch.rand(2, length) < 0.2 if padded else None
    _, state = mixer(x[:5])
    with Largest() as largest:
        mixer(x, state, padding)[0].sum().backward()
    assert length * WIDTH < largest.numbers < length * length / 10
