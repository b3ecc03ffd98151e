"""The options: the numbers that they must reach, and the models in which they have an effect."""

from __future__ import annotations

from dataclasses import fields

import pytest
from fairseq import models as registered
from support.language_models import SMALL, build, make_task, options_of

from fw_fairseq.config import (
    DECODER_OPTIONS,
    FastWeightConfig,
    check_options,
    layer_mixers,
    option_name,
    options_read,
    refuse_without_effect,
)
from fw_fairseq.feature_maps import FEATURE_MAPS
from fw_fairseq.mixers import MIXERS
from fw_fairseq.mixers.options import DECLARED, MixerOptions

pytestmark = pytest.mark.quick

SHARES = ("srupp_dropout", "sru_dropout", "sru_projection_dropout", "pooling_dropout", "attention_dropout")
LEAST = dict.fromkeys(("feature_dim", "favor_features", "sru_projection", "srupp_width"), 0)
LEAST |= dict.fromkeys(("ffn_sparsity", "ffn_controller_dim", "qkv_sparsity", "output_sparsity", "ffn_sru"), 0)
LEAST |= (
    dict.fromkeys((*SHARES, "write_strength_init", "output_dropout"), 0)
    | dict.fromkeys(("dpfp_nu", "srupp_heads", "srupp_memory", "srupp_segment", "xl_memory", "xl_segment", "slots"), 1)
    | {"fwm_width": 1, "fwm_reads": 1}
    | {"slot_positions": 1, "product_steps": 1, "key_heads": 0, "short_conv": 0, "token_shift_rank": 0, "value_mixing_rank": 0}
    | {"local_window": 2, "sru_highway_bias": -100, "expand_values": 0.01, "output_norm_eps": 0}
    | {"output_gate_rank": 0, "gate_rank": 0}
)


@pytest.mark.parametrize("name", LEAST)
def test_a_number_below_the_least_is_refused(name):
    check_options(FastWeightConfig(**{name: LEAST[name]}))
    with pytest.raises(
        ValueError, match=rf"^{option_name(name)} is {LEAST[name] - 1}; it must be at least {LEAST[name]}( and below 1(00)?)?$"
    ):
        build(**{name: LEAST[name] - 1})


def test_a_share_stays_below_one():
    for name in SHARES:
        with pytest.raises(ValueError, match=rf"^{option_name(name)} is 1; it must be at least 0 and below 1$"):
            build(**{name: 1})


def test_every_number_has_a_least():
    numbers = {f.name for f in fields(FastWeightConfig) if f.type in (int, float)}
    assert numbers == {f.name for f in fields(FastWeightConfig) if "least" in f.metadata} == {*LEAST}


def refusal(**options) -> str | None:
    args = options_of("fast_weight_lm", **{**SMALL, **options})
    model = registered.MODEL_REGISTRY["fast_weight_lm"].build_model(args, make_task(40))
    try:
        model.refuse_without_effect(args)
    except ValueError as error:
        return str(error)


WEIGHTS = "--mixer softmax or --mixer srupp or --mixer local_attention or --mixer transformer_xl"
ELSEWHERE = [
    ({"xl_memory": 3}, {"mixer": "transformer_xl"}, "--mixer transformer_xl"),
    ({"local_window": 3}, {"mixer": "local_attention"}, "--mixer local_attention"),
    ({"window_sizes": "4"}, {"mixer_pattern": "sru,leap"}, "--mixer additive or --mixer leap"),
    ({"slot_positions": 8}, {"mixer": "linformer"}, "--mixer linformer"),
    ({"slots": 8}, {"mixer": "abc"}, "--mixer linformer or --mixer abc or --mixer gsa"),
    ({"sru_projection": 8}, {"mixer": "sru"}, "--mixer sru"),
    ({"srupp_heads": 2}, {"mixer": "srupp", "srupp_width": 8}, "--mixer srupp"),
    ({"dpfp_nu": 2}, {"feature_map": "dpfp"}, "--feature-map dpfp"),
    (
        {"favor_features": 8},
        {"feature_map": "rfa", "feature_norm": "none"},
        "--feature-map favor or --feature-map favor_relu or --feature-map rfa",
    ),
    ({"favor_prescale": True}, {"feature_map": "favor"}, "--feature-map favor"),
    ({"attention_dropout": 0.5}, {"mixer_pattern": "fast_weight,softmax"}, WEIGHTS),
    ({"attention_dropout": 0.5}, {"mixer": "srupp"}, WEIGHTS),
    ({"sru_rescale": False}, {"mixer": "sru"}, "--mixer sru"),
    ({"srupp_rescale": False}, {"mixer": "srupp"}, "--mixer srupp"),
    ({"sru_tanh": True}, {"mixer": "srupp"}, "--mixer sru or --mixer srupp"),
    ({"pooling_form": "published"}, {"mixer": "leap"}, "--mixer additive or --mixer leap"),
]


@pytest.mark.parametrize(("option", "with_effect", "owner"), ELSEWHERE)
def test_an_option_that_no_layer_reads_is_refused(option, with_effect, owner):
    (name,) = option
    assert refusal(**option) == f"{option_name(name)} has no effect without {owner}; leave it out"
    assert refusal(**option, **with_effect) is None


@pytest.mark.parametrize(
    "option",
    [
        {"update_rule": "sum"},
        {"feature_map": "identity"},
        {"attention_norm": True},
        {"attention_norm_of": "read"},
        {"write_strength_init": 0.5},
        {"scale_reads": True},
    ],
)
def test_options_of_fast_weights_are_refused_without_any(option):
    (name,) = option
    assert refusal(mixer="sru", **option) == f"{option_name(name)} has no effect without --mixer fast_weight; leave it out"


def test_mixers_that_can_leave_their_biases_out():
    able = ["softmax", "fast_weight", "local_attention", "transformer_xl"]
    said = f"--bias-free has no effect without {' or '.join(f'--mixer {mixer}' for mixer in able)}; leave it out"
    assert refusal(mixer="sru", bias_free=True) == said
    assert all(refusal(mixer=mixer, bias_free=True) is None for mixer in able)


def test_a_mixer_beside_a_pattern_is_refused():
    assert refusal(mixer="sru", mixer_pattern="leap") == "--mixer has no effect beside --mixer-pattern; leave one of them out"


@pytest.mark.parametrize("arch", registered.ARCH_MODEL_INV_REGISTRY["fast_weight_lm"])
@pytest.mark.parametrize("mixer", ["sru", "softmax", "leap", "fast_weight"])
def test_architectures_leave_out_options_of_a_mixer_that_was_replaced(arch, mixer):
    for given in ({"mixer": mixer}, {"mixer_pattern": mixer}, {}):
        args = options_of(arch, **given)
        refuse_without_effect(
            args,
            FastWeightConfig,
            options_read(args, layer_mixers(args, args.decoder_layers), "mixer", "mixer_pattern", *DECODER_OPTIONS),
        )


def test_layers_that_are_kept_keep_their_options():
    assert refusal(mixer="additive", decoder_layers_to_keep="0") is refusal(mixer="sru", decoder_layers_to_keep="1") is None


class Watched(MixerOptions):
    """Options of which only these may be read."""

    def __init__(self, config, names):
        super().__init__(**{name: getattr(config, name) for name in DECLARED})
        self.names = names

    def __getattribute__(self, name):
        assert name not in DECLARED or "names" not in vars(self) or name in vars(self)["names"], name
        return super().__getattribute__(name)


def test_a_mixer_reads_the_options_that_it_names():
    """Reading another one fails here, so that ``options`` is complete."""
    for name, mixer in MIXERS.items():
        for phi in FEATURE_MAPS if "feature_map" in mixer.options else ["elu"]:
            norm = "sum" if FEATURE_MAPS[phi].non_negative else "l2"
            config = FastWeightConfig(feature_map=phi, feature_norm=norm)
            names = options_read(config, [name])
            mixer.of_layer(8, 2, Watched(config, names), 0, 2)


def test_a_mixer_names_the_options_of_its_settings():
    """Its feature map may name them in its place."""
    for mixer in MIXERS.values():
        maps = FEATURE_MAPS.values() if "feature_map" in mixer.options else []
        assert {*mixer.settings} == {*mixer.options}.union(*(phi.options for phi in maps)) - {"window_sizes"}
