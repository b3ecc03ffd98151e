"""A mixer behind fairseq's interface: each call stands for itself, whatever the calls before it were and however they ended."""

from __future__ import annotations

import pytest
import torch
from support.language_models import assert_close, build, draw

from fw_fairseq.config import FastWeightConfig
from fw_fairseq.mixers import Additive, FastWeight, Leap
from fw_fairseq.modules import LayerStates, MixerAttention, Streams

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]


def test_a_refused_call_leaves_nothing_behind():
    """While decoding, and among workers: the next call of the mixer has neither."""
    attention, x = MixerAttention(FastWeight(8, 2, FastWeightConfig()), 0), torch.randn(1, 2, 8)
    with pytest.raises(ValueError, match="padding_mask"):
        attention(x, torch.zeros(3, 1, dtype=torch.bool), incremental_state={})
    with pytest.raises(AttributeError, match="size"):
        attention(x, states=LayerStates(group="workers"))
    _, state = attention.mixer(x)
    assert isinstance(state.memory, torch.Tensor)
    assert_close(attention(x)[0], attention.mixer(x)[0])


@pytest.mark.parametrize("mixer", [Additive, Leap])
def test_a_window_far_longer_than_the_text_costs_no_memory_in_training(mixer):
    """As in deep models, whose windows double from layer to layer: of this one no machine could keep the state."""
    layer = MixerAttention(mixer(8, 2, window=2**40), 0)
    x = torch.randn(5, 3, 8)
    y, _ = layer(x)
    y.sum().backward()
    everything = mixer(8, 2)
    everything.load_state_dict(layer.mixer.state_dict())
    assert_close(y, everything(x)[0])
    assert layer.mixer.state_size() > 2**44


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("options", [{}, {"mixer": "additive"}, {"mixer_pattern": "softmax,sru"}], ids=str)
def test_a_backward_after_another_forward_belongs_to_its_own(options, checkpointed):
    """Activation checkpointing runs the layers again in the backward, when the model has read something else in between."""
    model = build(no_token_positional_embeddings=True, checkpoint_activations=checkpointed, **options).train()
    tokens, resets, streams = draw(2, 9), torch.rand(2, 5) < 0.3, Streams()
    with torch.no_grad():
        model(tokens[:, :4], streams=streams)
    expected = gradients(model, model(tokens[:, 4:], streams=streams, reset_mask=resets)[0])
    again = Streams()
    with torch.no_grad():
        model(tokens[:, :4], streams=again)
    y = model(tokens[:, 4:], streams=again, reset_mask=resets)[0]
    model(draw(2, 7))
    for name, gradient in gradients(model, y).items():
        assert_close(gradient, expected[name])


def gradients(model, y) -> dict:
    model.zero_grad()
    y.square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_random_features_of_training_stay_while_a_text_goes_on():
    """The next segment reads what was written with them."""
    options = {"feature_map": "favor", "feature_norm": "none", "update_rule": "sum"}
    model, tokens = build(no_token_positional_embeddings=True, **options).train(), draw(2, 9)
    assert not torch.allclose(model(tokens)[0], model(tokens)[0])
    assert_close(model(tokens, streams=Streams())[0], model(tokens, streams=Streams())[0])


def test_models_of_an_ensemble_read_the_same_streams():
    """Each with its own memory, whatever the order in which they ask."""
    models, tokens, streams = [build(no_token_positional_embeddings=True) for _ in range(2)], draw(2, 9), Streams()
    expected = [model(tokens)[0] for model in models]
    first = [model(tokens[:, :4], streams=streams)[0] for model in models]
    rest = [model(tokens[:, 4:], streams=streams)[0] for model in reversed(models)]
    for parts, whole in zip(zip(first, reversed(rest)), expected):
        assert_close(torch.cat(parts, 1), whole)
