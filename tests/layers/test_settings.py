"""Mixers in Python: settings by name, with the defaults and limits of the command line's options."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from fw_fairseq.config import DECODER_OPTIONS, FastWeightConfig
from fw_fairseq.mixers import MIXERS, FastWeight, Leap, Linformer, Mixer, Sru, Srupp
from fw_fairseq.mixers.options import DECLARED

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]
OPTIONS = {f.name: f for f in fields(FastWeightConfig)}


@pytest.mark.parametrize("name", DECLARED)
def test_an_option_is_declared_once(name):
    option, declared = OPTIONS[name], DECLARED[name]
    assert (option.default, option.metadata) == (declared.default, declared.metadata)
    choices = declared.metadata.get("choices")
    assert (option.type is declared.type) == (choices is None)
    assert [*getattr(option.type, "__members__", ())] == [*(choices or ())]


def test_every_option_of_a_mixer_is_a_setting():
    of_models = {"_name", "mixer", "mixer_pattern", "window_sizes", *DECODER_OPTIONS}
    assert {name for kind in MIXERS.values() for name in kind.settings} == DECLARED.keys() - of_models == OPTIONS.keys() - of_models


def test_defaults_stay():
    """A checkpoint or an export from before an option computes with the option's default."""
    zeros = {"dpfp_nu": 1, "product_steps": 2, "srupp_heads": 1, "srupp_segment": 1, "xl_segment": 1, "sru_highway_bias": -2}
    sizes = {"srupp_memory": 512, "local_window": 32, "xl_memory": 256, "slot_positions": 1024, "slots": 32}
    sizes |= {"fwm_width": 32, "fwm_reads": 3}
    words = {"update_rule": "delta", "feature_map": "elu", "feature_norm": "sum", "attention_norm_of": "read_and_erase"}
    words |= {"fast_weight_backend": "auto", "pooling_form": "adapted", "sru_init": "variance"}
    words |= {"output_norm_of": "head", "output_gate_form": "silu", "scale_reads_of": "values", "projection_init": "xavier"}
    sizes |= {"expand_values": 1.0, "output_norm_eps": 1e-5}
    on = dict.fromkeys(["sru_rescale", "srupp_rescale", "sru_input_bias"], True)
    others = zeros | sizes | words | on
    assert {name: declared.default for name, declared in DECLARED.items()} == {
        name: others.get(name, "" if name == "window_sizes" else 0) for name in DECLARED
    }


@pytest.mark.parametrize("name", MIXERS)
def test_defaults_are_those_of_the_options(name):
    """With a seed, the layer without a config is that of a model with default options; so is one of an object without attributes,
    such as the options of an earlier export."""
    outputs, x = [], torch.randn(5, 2, 16)
    for config in (None, FastWeightConfig(), SimpleNamespace()):
        torch.manual_seed(1)
        outputs.append(MIXERS[name](16, 4, config)(x)[0])
    torch.testing.assert_close(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[0], outputs[2])


def test_settings_by_name():
    assert Leap(128, heads=4, window=8).window == 8 and Leap(128, heads=4).head_dim == 32
    assert Sru(16, sru_highway_bias=-1).in_proj.bias[-1].item() == -1
    assert FastWeight(32, heads=4, update_rule="gated", feature_map="dpfp", dpfp_nu=2).rule_name == "gated"
    assert Linformer(8, config=FastWeightConfig(slots=3), slot_positions=7).position_weight.shape == (7, 1, 3)


def test_one_head_where_nothing_is_said():
    assert {kind(7).num_heads for kind in (Mixer, *MIXERS.values())} == {1}


def test_what_layers_around_a_mixer_ask_of_it():
    mixers = {name: kind(8) for name, kind in MIXERS.items()}
    assert [name for name, mixer in mixers.items() if not mixer.takes_source] == ["srupp"]
    assert not any(mixer.takes_shared or mixer.norms_residual for mixer in mixers.values())
    assert FastWeight(8, value_mixing_rank=1, layers=2).takes_shared and not Sru(8, sru_projection=4).takes_source
    assert MIXERS["additive"](8, pooling_form="published").norms_residual


def test_a_mixer_beside_a_base_that_is_told_of_its_subclasses():
    told = []

    class Listed:
        def __init_subclass__(cls):
            told.append(cls.__name__)

    other = type("Other", (Mixer, Listed), {"settings": ("slots",)})
    assert told == ["Other"] and other.options == ("slots",)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: Sru(8, widht=3), r"^Sru has no setting widht; it has: sru_projection, "),
        (lambda: Sru(8, xl_memory=3), "^Sru has no setting xl_memory"),
        (lambda: Srupp(8, srupp_memory=0), "^srupp_memory is 0; it must be at least 1$"),
        (lambda: Srupp(8, srupp_dropout=1.0), "^srupp_dropout is 1.0; it must be at least 0 and below 1$"),
        (lambda: Srupp(8, srupp_memory=2.5), "^srupp_memory is 2.5; it must be a whole number$"),
        (lambda: Srupp(8, srupp_memory=True), "^srupp_memory is True; it must be a whole number$"),
        (lambda: Srupp(8, srupp_dropout="a"), "^srupp_dropout is 'a'; it must be a number$"),
        (lambda: Sru(8, sru_tanh=1), "^sru_tanh is 1; it must be True or False$"),
        (lambda: FastWeight(8, dpfp_nu=2), "^dpfp_nu has no effect with feature_map 'elu'; it is for: dpfp$"),
        (
            lambda: FastWeight(8, feature_map="relu", favor_features=4),
            "^favor_features has no effect with feature_map 'relu'; it is for: favor, favor_relu, rfa$",
        ),
        (lambda: FastWeight(8, update_rule="dleta"), "^update_rule is 'dleta'; it must be one of: sum, "),
        (lambda: Leap(8, heads=3), "^embed_dim is 8; it must be a multiple of the number of heads, 3$"),
    ],
)
def test_what_is_not_allowed_is_one_sentence(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_a_mixer_without_settings():
    with pytest.raises(ValueError, match=r"^Mixer has no setting width; it has: none$"):
        Mixer.read_settings(None, {"width": 3})
