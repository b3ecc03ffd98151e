"""Small language models, built as fairseq builds them."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict

import torch
from fairseq import models as registered
from fairseq.data import Dictionary
from support.draws import PLAIN

from fw_fairseq.feature_maps import FEATURE_MAPS
from fw_fairseq.mixers import FastWeight
from fw_fairseq.models.fast_weight_lm import FastWeightLanguageModelConfig
from fw_fairseq.rules import RULES

NON_NEGATIVE = [name for name, phi in FEATURE_MAPS.items() if phi.non_negative]


ERASING = [name for name, rule in RULES.items() if rule.erases]


def every_map(rule: str) -> list[str]:
    """The feature maps that tests combine with a rule: all, or the identity alone for some whose gates are more than sigmoids. The
    others differ from those in their coefficients only, which tests/ops and tests/layers have."""
    with_identity = ("mamba2", "rwkv7", "comba", "delta_product", "gated_delta_product")
    return [*FEATURE_MAPS] if rule in PLAIN else ["identity"] if rule in with_identity else []


SMALL = {
    "decoder_layers": 2, "decoder_embed_dim": 32, "decoder_input_dim": 32, "decoder_output_dim": 32, "decoder_ffn_embed_dim": 48,
    "decoder_attention_heads": 4, "dropout": 0.0, "tokens_per_sample": 64,
}  # fmt: skip


FROM_OTHER_GROUPS = {"add_bos_token": False, "tokens_per_sample": 64, "max_target_positions": None, "tpu": False}


def make_task(size: int) -> Namespace:
    dictionary = Dictionary()
    for i in range(size - len(dictionary)):
        dictionary.add_symbol(f"w{i}")
    return Namespace(source_dictionary=dictionary, target_dictionary=dictionary)


def options_of(arch: str, **given) -> Namespace:
    """What fairseq-train makes of an architecture and the options given: its function first, then the defaults of the group."""
    args = Namespace(**given)
    registered.ARCH_CONFIG_REGISTRY[arch](args)
    defaults = (
        FastWeightLanguageModelConfig()
        if arch in registered.ARCH_MODEL_INV_REGISTRY["fast_weight_lm"]
        else registered.MODEL_DATACLASS_REGISTRY["transformer_lm"]()
    )
    return Namespace(**{**asdict(defaults), **FROM_OTHER_GROUPS, **vars(args)})


def build(task=None, **options):
    args = options_of("fast_weight_lm", **{**SMALL, **options})
    model = registered.MODEL_REGISTRY["fast_weight_lm"].build_model(args, task or make_task(40)).double().eval()
    for name, p in model.named_parameters():
        if name.endswith("alpha"):  # 0 at the start, and then what it multiplies has no gradient
            torch.nn.init.constant_(p, 0.5)
    for mixer in model.modules():  # likewise where a gate starts the same whatever the token
        if isinstance(mixer, FastWeight) and any(gate.still for gate in mixer.rule.gates.values()):
            torch.nn.init.xavier_uniform_(mixer.in_proj.weight)
    return model


def draw(batch: int, length: int) -> torch.Tensor:
    return torch.randint(4, 40, (batch, length))


def assert_close(actual, expected, tolerance: float = 1e-9):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
