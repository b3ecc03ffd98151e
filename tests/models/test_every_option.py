"""Every option of a model changes what training gives, or is refused."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from dataclasses import fields
from enum import Enum

import pytest
import torch
from fairseq import models as registered
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from support.language_models import make_task, options_of
from torch import nn
from torch.nn import functional as F

from fw_fairseq import Mistake
from fw_fairseq.config import FastWeightTransformerConfig, option_name
from fw_fairseq.feature_maps import FEATURE_MAPS
from fw_fairseq.mixers import MIXERS
from fw_fairseq.models.fast_weight_lm import FastWeightLanguageModelConfig
from fw_fairseq.models.retrieval import RetrievalConfig, RetrievalModel
from fw_fairseq.modules import Streams

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("one_thread")]

TINY = {
    "decoder_layers": 2, "decoder_embed_dim": 8, "decoder_input_dim": 8, "decoder_output_dim": 8, "decoder_ffn_embed_dim": 8,
    "decoder_attention_heads": 2, "dropout": 0.0, "tokens_per_sample": 16, "max_target_positions": 16,
}  # fmt: skip
OPTIONS = {f.name: f for f in fields(FastWeightLanguageModelConfig)}
ELSEWHERE = {"options_from", "no_decoding_graph", "graph_training"}  # the one stands for others, and graphs are of a GPU
ELSEWHERE |= {"allow_divergence"}  # which changes what is refused: tests/layers/test_parts.py
OWN = sorted(OPTIONS.keys() - {f.name for f in fields(TransformerLanguageModelConfig)} - ELSEWHERE)
VALUES = {  # where a default or the next number would change nothing in so small a model
    "write_strength_init": [0.25],
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
    "fwm_width": [4],
    "fwm_reads": [1],
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
    "scale_after_norm": {"scale_reads": True, "output_norm": True},
    "token_shift_rank": {"token_shift": True},
    "output_norm_of": {"output_norm": True},
    "output_norm_eps": {"output_norm": True},
    "norm_after_gate": {"output_norm": True, "output_gate": True},
    "output_gate_form": {"output_gate": True},
    "output_gate_rank": {"output_gate": True},
    "gate_rank": {"update_rule": "rwkv6", "attention_norm": False},
    "exponential_decay": {"update_rule": "gated"},
    "scale_reads_of": {"scale_reads": True, "feature_dim": 3},
    "short_conv_bias": {"short_conv": 2},
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


def values(name: str, options: dict = OPTIONS) -> list:
    default, kind = options[name].default, options[name].type
    if name in VALUES:
        return VALUES[name]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [choice.value for choice in kind if choice.value != str(default)]
    step = 0.5 if isinstance(default, float) else 1
    return [not default] if isinstance(default, bool) else [default + step] if isinstance(default, int | float) else [f"{default}1"]


def bases(name: str) -> list[dict]:
    """Models that read the option, and some that do not."""
    readers = {mixer: kind.options for mixer, kind in MIXERS.items() if name in kind.options}
    needed = NEEDS.get(name, {}).items()
    owners = [{"mixer": mixer, **{key: value for key, value in needed if key in read}} for mixer, read in readers.items()]
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
            step(model, F.cross_entropy(logits.flatten(0, 1), tokens.flatten()) if of_words else logits.square().mean())
    except Mistake as error:
        return str(error)
    return sum_of(logits, model)


def step(model: nn.Module, loss: torch.Tensor) -> None:
    loss.backward()
    with torch.no_grad():
        for x in filter(lambda x: x.grad is not None, model.parameters()):
            x -= 0.1 * x.grad
            x.grad = None


def sum_of(output: torch.Tensor, model: nn.Module) -> bytes:
    content = b"".join(x.detach().numpy().tobytes() for x in (output, *model.state_dict().values()))
    return hashlib.sha256(content).digest()


@pytest.fixture(scope="module")
def without() -> dict[str, bytes | str]:
    """What each model gives without the option, kept for the next."""
    return {}


@pytest.mark.cases_in_ci(12)
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


TRANSLATION = {"encoder_layers": 1, "decoder_layers": 2, "dropout": 0.0} | {
    f"{side}_{name}": value
    for side in ("encoder", "decoder")
    for name, value in {"embed_dim": 8, "ffn_embed_dim": 8, "attention_heads": 2}.items()
}
OF_TRANSLATION = {f.name: f for f in fields(FastWeightTransformerConfig) if not f.name.startswith("_")}
ALONE = {"value_mixing_rank"}  # refused in every translation model


def translating(**options) -> bytes | str:
    """As ``trained``, of two sentences and their translations."""
    torch.manual_seed(1)
    try:
        args = Namespace(**TRANSLATION | options)
        registered.ARCH_CONFIG_REGISTRY["fast_weight_transformer"](args)
        model = registered.MODEL_REGISTRY["fast_weight_transformer"].build_model(args, make_task(WORDS)).double().train()
        model.refuse_without_effect(args)
        for source, target in zip(TEXT, TEXT.flip(0)):
            logits, _ = model(source, torch.full((2,), 6), target)
            step(model, F.cross_entropy(logits.flatten(0, 1), target.flatten()))
    except Mistake as error:
        return str(error)
    return sum_of(logits, model)


@pytest.mark.cases_in_ci(12)
@pytest.mark.parametrize("name", sorted(OF_TRANSLATION.keys() - ELSEWHERE))
def test_every_option_of_translation_models(name, without):
    """In models where all attentions are linear, some or none."""
    effects, norms = 0, {"encoder_normalize_before": True} if name == "reversible" else {}
    subsets = [{"linear_attention": ""}, {"linear_attention": "encoder,cross"}]
    for base in (*bases(name), *(subset | NEEDS.get(name, {}) for subset in subsets if name not in subset)):
        base = base | norms
        before = without.setdefault(f"translation {base}", translating(**base))
        if isinstance(before, str):  # what the option needs is refused in its turn
            assert "--" in before and name in NEEDS and "linear_attention" in base, (base, before)
            continue
        for value in VALUES_OF_TRANSLATION.get(name) or values(name, OF_TRANSLATION):
            after = translating(**base | {name: value})
            assert after != before, (base, value)
            assert isinstance(after, bytes) or "--" in after, (base, value, after)
            effects += isinstance(after, bytes)
    assert bool(effects) == (name not in ALONE)


VALUES_OF_TRANSLATION = {
    "linear_attention": ["", "encoder", "decoder,cross"],
    "decoder_attentions": [2],
    "attention_dropout": [0.5],
}
OF_RETRIEVAL = {f.name: f for f in fields(RetrievalConfig) if not f.name.startswith("_")}


def retrieving(**options) -> bytes | str:
    """As ``trained``, of pairs to retrieve."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(0)
    try:
        config = RetrievalConfig(**{"key_dim": 4} | options)
        model = RetrievalModel.build_model(config, Namespace(cfg=Namespace(symbols=5))).double().train()
        model.refuse_without_effect(config)
        for _ in range(2):
            keys, values, queries = (torch.randint(5, (3, length), generator=generator) for length in (7, 7, 2))
            read = model(keys, values, queries)
            step(model, (read - 0.5).square().mean())
    except Mistake as error:
        return str(error)
    return sum_of(read, model)


@pytest.mark.parametrize("name", sorted(OF_RETRIEVAL.keys() - ELSEWHERE))
def test_every_option_of_retrieval(name, without):
    effects, others = 0, ({}, {"update_rule": "sum"}, {"mixer": "softmax"})
    for base in (*bases(name), *others):
        if base.get("mixer") not in (None, "fast_weight", "softmax") or not base.keys() <= OF_RETRIEVAL.keys():
            continue
        before = without.setdefault(f"retrieval {base}", retrieving(**base))
        if name in base or isinstance(before, str):
            continue
        for value in values(name, OF_RETRIEVAL):
            after = retrieving(**base | {name: value})
            assert after != before, (base, value)
            assert isinstance(after, bytes) or "--" in after, (base, value, after)
            effects += isinstance(after, bytes)
    read = "attention_norm dpfp_nu favor_features favor_prescale feature_map feature_norm key_dim mixer"
    assert bool(effects) == (name in f"{read} update_rule write_strength_init".split())


def test_the_comparison_sees_no_difference_where_there_is_none():
    for run in (trained, translating, retrieving):
        assert run() == run() == run(update_rule="delta") != run(update_rule="sum")
