"""Every option of a language model changes what training gives, or is refused."""

from __future__ import annotations

import hashlib
from dataclasses import fields
from enum import Enum

import pytest
import torch
from fairseq import models as registered
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from support.language_models import make_task, options_of
from torch.nn import functional as F

from fw_fairseq import Mistake
from fw_fairseq.config import option_name
from fw_fairseq.feature_maps import FEATURE_MAPS
from fw_fairseq.mixers import MIXERS
from fw_fairseq.models.fast_weight_lm import FastWeightLanguageModelConfig
from fw_fairseq.modules import Streams

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = {
    "decoder_layers": 2, "decoder_embed_dim": 8, "decoder_input_dim": 8, "decoder_output_dim": 8, "decoder_ffn_embed_dim": 8,
    "decoder_attention_heads": 2, "dropout": 0.0, "tokens_per_sample": 16, "max_target_positions": 16,
}  # fmt: skip
OPTIONS = {f.name: f for f in fields(FastWeightLanguageModelConfig)}
ELSEWHERE = {"options_from", "no_decoding_graph"}  # the one stands for others, and graphs are of a GPU
OWN = sorted(OPTIONS.keys() - {f.name for f in fields(TransformerLanguageModelConfig)} - ELSEWHERE)
VALUES = {  # where a default or the next number would change nothing in so small a model
    "mixer_pattern": ["softmax,fast_weight"],
    "fast_weight_backend": ["recurrent"],  # auto may choose the others
    "feature_dim": [3],
    "favor_features": [3],
    "window_sizes": ["2", "3,0"],
    "sru_projection": [3],
    "srupp_width": [4],
    "srupp_heads": [2],
    "srupp_memory": [1],
    "local_window": [2],
    "short_conv": [3],
    "xl_memory": [1],
    "slots": [3],
    "slot_positions": [3],
    "ffn_sparsity": [2],
    "ffn_controller_dim": [3],
    "qkv_sparsity": [2],
    "output_sparsity": [2],
}
NEEDS = {  # beside the mixer
    "plain_adaptive_softmax": {"adaptive_softmax_cutoff": "10,20"},
    "attention_norm_of": {"attention_norm": True},
    "product_steps": {"update_rule": "delta_product"},
    "token_shift_rank": {"token_shift": True},
    "sru_projection_norm": {"sru_projection": 4},
    "sru_projection_dropout": {"sru_projection": 4},
    "srupp_heads": {"srupp_width": 4},
    "ffn_controller_dim": {"ffn_sparsity": 2},
    "reversible": {"decoder_normalize_before": True},
    "srupp_segment": {"srupp_memory": 1},
    "xl_segment": {"xl_memory": 1},
}
WORDS = 40
TEXT = torch.randint(4, WORDS, (3, 2, 6), generator=torch.Generator().manual_seed(0))


def values(name: str) -> list:
    default = OPTIONS[name].default
    if name in VALUES:
        return VALUES[name]
    if isinstance(OPTIONS[name].type, type) and issubclass(OPTIONS[name].type, Enum):
        return [choice.value for choice in OPTIONS[name].type if choice.value != str(default)]
    step = 0.5 if isinstance(default, float) else 1
    return [not default] if isinstance(default, bool) else [default + step] if isinstance(default, int | float) else [f"{default}1"]


def bases(name: str) -> list[dict]:
    """Models that read the option, and some that do not."""
    owners = [{"mixer": mixer} | NEEDS.get(name, {}) for mixer, kind in MIXERS.items() if name in kind.options]
    maps = {phi: "sum" if kind.non_negative else "l2" for phi, kind in FEATURE_MAPS.items() if name in kind.options}
    if name in NEEDS and not owners:
        owners = [NEEDS[name]]
    owners += [{"feature_map": phi, "feature_norm": norm} for phi, norm in maps.items()]
    others = [
        base for base in ({}, {"mixer": "sru"}, {"mixer": "softmax"}) if base.get("mixer") not in {x.get("mixer") for x in owners}
    ]
    return [base for base in (*owners, *others) if name not in base]


def trained(**options) -> bytes | str:
    """A sum of everything that three segments of two texts leave, or why the options are refused."""
    args = options_of("fast_weight_lm", **TINY | options)
    torch.manual_seed(1)
    try:
        model = registered.MODEL_REGISTRY["fast_weight_lm"].build_model(args, make_task(WORDS)).double().train()
        model.refuse_without_effect(args)
        streams = Streams()
        for tokens in TEXT:
            logits, _ = model(tokens, streams=streams)
            of_words = logits.shape[-1] == WORDS  # an adaptive softmax comes after what the model returns
            (F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) if of_words else logits.square().mean()).backward()
            with torch.no_grad():
                for x in filter(lambda x: x.grad is not None, model.parameters()):
                    x -= 0.1 * x.grad
                    x.grad = None
    except Mistake as error:
        return str(error)
    content = b"".join(x.detach().numpy().tobytes() for x in (logits, *model.state_dict().values()))
    return hashlib.sha256(content).digest()


@pytest.fixture(scope="module")
def without() -> dict[str, bytes | str]:
    """What each model gives without the option, kept for the next."""
    return {}


@pytest.mark.parametrize("name", [*OWN, "attention_dropout"])
def test_every_option_has_an_effect_or_is_refused(name, without):
    effects = 0
    for base in bases(name):
        before = without.setdefault(repr(base), trained(**base))
        assert isinstance(before, bytes), (base, before)
        for value in [0.5] if name == "attention_dropout" else values(name):
            after = trained(**base | {name: value})
            assert after != before, (base, value)
            assert isinstance(after, bytes) or "--" in after, (base, value, after)
            effects += isinstance(after, bytes)
    assert effects, f"{option_name(name)} is refused everywhere"


def test_the_comparison_sees_no_difference_where_there_is_none():
    assert trained() == trained() == trained(update_rule="delta") != trained(update_rule="sum")
