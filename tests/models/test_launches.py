"""An update of a model of the recipes, by fairseq's trainer: how much it asks of a GPU."""

from __future__ import annotations

import pytest
from support.launches import count_update, trainer_of

import fw_fairseq.models  # noqa: F401

WORDS = 300
SMALL = (
    "--arch fast_weight_lm_wiki103_small --decoder-layers 2 --adaptive-input-cutoff 50,100,200 --adaptive-softmax-cutoff 50,100,200"
    " --criterion fast_weight_cross_entropy --clip-norm 0.25 --update-rule delta --feature-norm sum --log-interval 3"
)

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("one_thread")]


def test_an_update_of_the_small_model():
    """The optimiser and the norm of the gradients are one launch each, whatever the number of layers, and statistics of the
    memories cost something only where they are logged."""
    trainer = trainer_of(WORDS, *SMALL.split())
    _, plain, logged = (count_update(trainer, WORDS) for _ in range(3))
    assert plain.launches["_fused_adamw_"] == plain.launches["_foreach_norm"] == 1 and not plain.launches["addcdiv_"]
    assert plain.launches["delta_forward"] == plain.launches["delta_backward"] == 2
    assert plain.launches.total() < 260 and plain.waits.total() <= 10, "three of these are for numbers on the CPU"
    assert logged.launches.total() - plain.launches.total() > 10
    assert logged.waits.total() - plain.waits.total() >= 3 * 2, "gates, write strength and norm of each layer"
