"""Architectures of published recurrences: the parts that each has got later, and checkpoints from before."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from fairseq import models as registered
from support.language_models import make_task, options_of

pytestmark = pytest.mark.usefixtures("one_thread")
WORDS = 20
TINY = {f"decoder_{name}_dim": 8 for name in ("embed", "input", "output", "ffn_embed")}
TINY |= {"decoder_layers": 2, "decoder_attention_heads": 2}
LATER = {
    "rwkv6_lm": {"token_shift_rank": 32},
    "retnet_lm": {"rotary": True},
    "rwkv7_lm": {"value_mixing_rank": 32},
}  # architecture: its later options
BEFORE = {"token_shift_rank": 0, "rotary": False, "value_mixing_rank": 0}


def built(args: Namespace, arch: str) -> torch.nn.Module:
    """The model that fairseq makes of the options in a checkpoint, which name their architecture."""
    args._name = arch
    return registered.build_model(args, make_task(WORDS)).eval()


@pytest.mark.parametrize("arch", LATER)
def test_later_parts_can_be_left_out(arch):
    assert LATER[arch].items() <= vars(options_of(arch, **TINY)).items()
    without = {name: BEFORE[name] for name in LATER[arch]}
    assert without.items() <= vars(options_of(arch, **TINY, **without)).items()


@pytest.mark.parametrize("arch", LATER)
@torch.no_grad()
def test_a_checkpoint_of_before_computes_as_before(arch):
    old = options_of(arch, **TINY, **{name: BEFORE[name] for name in LATER[arch]})
    torch.manual_seed(1)
    want = built(old, arch)
    for name in LATER[arch]:
        delattr(old, name)
    model, tokens = built(old, arch), torch.randint(4, WORDS, (2, 9))
    model.load_state_dict(want.state_dict())
    torch.testing.assert_close(model(tokens)[0], want(tokens)[0], atol=0, rtol=0)
