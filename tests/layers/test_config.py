"""Every number that an option must reach, refused in one place."""

from __future__ import annotations

from dataclasses import fields

import pytest
from support.language_models import build

from fw_fairseq.config import FastWeightConfig, check_numbers, option_name

LEAST = dict.fromkeys(("feature_dim", "favor_features", "sru_projection", "srupp_width"), 0)
LEAST |= (
    {"srupp_dropout": 0}
    | dict.fromkeys(("dpfp_nu", "srupp_heads", "srupp_memory", "xl_memory", "slots", "slot_positions"), 1)
    | {"local_window": 2}
)


@pytest.mark.parametrize("name", LEAST)
def test_a_number_below_the_least_is_refused(name):
    check_numbers(FastWeightConfig(**{name: LEAST[name]}))
    with pytest.raises(
        ValueError, match=rf"^{option_name(name)} is {LEAST[name] - 1}; it must be at least {LEAST[name]}( and below 1)?$"
    ):
        build(**{name: LEAST[name] - 1})


def test_a_share_stays_below_one():
    with pytest.raises(ValueError, match=r"^--srupp-dropout is 1; it must be at least 0 and below 1$"):
        build(srupp_dropout=1)


def test_every_number_has_a_least():
    free = {"sru_highway_bias"}
    numbers = {f.name for f in fields(FastWeightConfig) if f.type in (int, float)}
    assert numbers - free == {f.name for f in fields(FastWeightConfig) if "least" in f.metadata} == {*LEAST}
