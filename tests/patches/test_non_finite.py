"""The first tensor that is not finite, in this project's models and in any other."""

from __future__ import annotations

import pytest
import torch
from fairseq.modules import MultiheadAttention
from support.language_models import build
from torch import nn

import fw_fairseq.models  # noqa: F401
from fw_fairseq.patches.non_finite import FirstNonFinite

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "options, part, said",
    [
        ({"feature_map": "relu"}, "feature_map.weight", "the output of {}.feature_map, whose weight is not finite"),
        ({"mixer": "sru"}, "gate_weight", "the output of {}, whose gate_weight is not finite"),
        (
            {"mixer": "additive"},
            "query_score",
            "what the memory of layer 1 gives to {}.norm; query_score of that layer is not finite",
        ),
    ],
)
def test_parameters_that_a_mixer_uses_itself_are_named(options, part, said):
    model = build(**options)
    name = "decoder.layers.1.self_attn.mixer"
    model.get_parameter(f"{name}.{part}").data.view(-1)[0] = float("inf")
    with FirstNonFinite(model) as found:
        model(torch.randint(4, 40, (2, 9)))
    assert found.sentence == f"the first is {said.format(name)}"
    assert "linear" not in vars(getattr(model.get_submodule(name), "feature_map", model))


def test_the_first_gradient_that_is_not_finite_is_found():
    """The one nearest to the loss."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    with FirstNonFinite(model) as found:
        y = model(torch.zeros(4, 2))
        (y - y.detach()).abs().sqrt().sum().backward()
    assert found.sentence == "the first is the gradient of 1"


@pytest.mark.parametrize("bits", [torch.float32, torch.bfloat16])
def test_a_feature_map_that_overflows_is_named(bits):
    """Its weights are finite, and the mixer calls its linear part without the map's own forward."""
    model = build(feature_map="relu").to(bits)
    model.decoder.layers[1].self_attn.mixer.feature_map.weight.data.fill_(torch.finfo(bits).max)
    with FirstNonFinite(model) as found:
        model(torch.randint(4, 40, (2, 9)))
    assert found.sentence == "the first is the output of decoder.layers.1.self_attn.mixer.feature_map"


def test_the_gradient_of_a_feature_map_is_found():
    model = build(feature_map="relu")
    part = model.decoder.layers[1].self_attn.mixer.feature_map
    part.weight.register_hook(lambda gradient: gradient * float("nan"))
    with FirstNonFinite(model) as found:
        model(torch.randint(4, 40, (2, 9)))[0].sum().backward()
    assert found.sentence == "the first is the gradient of decoder.layers.1.self_attn.mixer.feature_map"


class Scaled(nn.Module):
    """Takes keywords only and returns a tensor of ``shape``."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight, self.shape = nn.Parameter(torch.ones(())), shape

    def forward(self, *, x):
        return (x.sum() * self.weight).expand(self.shape)


class Doubled(nn.Module):
    """Has a part, and a parameter of its own if it is told to."""

    def __init__(self, own: bool):
        super().__init__()
        self.part = nn.Linear(2, 2)
        self.register_parameter("weight", nn.Parameter(torch.ones(())) if own else None)

    def forward(self, x):
        return self.part(x) * (2 if self.weight is None else 2 * self.weight)


def test_a_part_without_parameters_of_its_own_is_not_named():
    """Another reads what it makes."""
    model = nn.Sequential(Doubled(own=False), nn.Linear(2, 2))
    model[0].part.weight.data.zero_()
    model[0].part.bias.data.fill_(3e38)
    with FirstNonFinite(model) as found:
        model(torch.zeros(4, 2))
    assert found.sentence == "the first is what comes into 1"


def test_a_gradient_is_of_the_part_that_has_the_parameter():
    """Not of what is around it, although that has finished later."""
    model = nn.Sequential(Doubled(own=True))
    model[0].part.weight.register_hook(lambda gradient: gradient * float("nan"))
    with FirstNonFinite(model) as found:
        model(torch.zeros(4, 2)).sum().backward()
    assert found.sentence == "the first is the gradient of 0.part"


class Bare(nn.Module):
    """Takes nothing and returns no tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self):
        return ()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_modules_of_other_projects(shape):
    model = nn.ModuleDict({"bare": Bare(), "scaled": Scaled(*shape)})
    model["scaled"].weight.data.fill_(float("inf"))
    with FirstNonFinite(model) as found:
        model["bare"]()
        model["scaled"](x=torch.ones(4))
    assert found.sentence == "the first is the output of scaled, whose weight is not finite"
    with FirstNonFinite(model) as found:
        model["scaled"](x=torch.full((4,), float("nan")))
    assert found.sentence == "the first is what comes into scaled"


def test_a_part_that_did_not_run_is_not_named():
    """The output overflows, whatever that part holds."""
    model = nn.ModuleDict({"scaled": Scaled(2)})
    model["scaled"].part = nn.Linear(2, 2)
    model["scaled"].part.weight.data.fill_(float("nan"))
    with FirstNonFinite(model) as found:
        model["scaled"](x=torch.full((4,), 3e38))
    assert found.sentence == "the first is the output of scaled"


def test_fairseqs_attention():
    """It is called with keywords only, and uses its projections' parameters itself."""
    attention = MultiheadAttention(8, 2, add_bias_kv=True, self_attention=True)
    attention.bias_k.data.fill_(float("nan"))
    x = torch.ones(3, 1, 8)
    with FirstNonFinite(nn.ModuleDict({"attention": attention})) as found:
        attention(query=x, key=x, value=x)
    assert found.sentence == "the first is the output of attention, whose bias_k is not finite"


def test_the_error_that_is_handled_gets_the_place():
    model = nn.ModuleDict({"scaled": Scaled(2)})
    model["scaled"].weight.data.fill_(float("nan"))
    error = FloatingPointError("loss is NaN")
    try:
        raise error
    except FloatingPointError:
        with FirstNonFinite(model) as found:
            model["scaled"](x=torch.ones(4))
    assert error.first_non_finite == found.sentence


def test_nothing_is_left_on_the_model():
    model = build(feature_map="relu")
    part = model.decoder.layers[0].self_attn.mixer.feature_map
    with FirstNonFinite(model):
        assert "linear" not in vars(part)
        model(torch.randint(4, 40, (2, 9)))
    assert not any(module._forward_hooks for module in model.modules())
    assert not torch.overrides._get_current_function_mode_stack()
