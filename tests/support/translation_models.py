"""Small translation models, built as fairseq builds them, and sentences for them."""

from __future__ import annotations

from argparse import Namespace

import torch
from fairseq import models as registered
from support.language_models import make_task

import fw_fairseq.models  # noqa: F401

SIDE = {"layers": 2, "embed_dim": 32, "ffn_embed_dim": 48, "attention_heads": 4}


def build(**options):
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIDE.items()}
    args = Namespace(dropout=0.0, **sides, **options)
    registered.ARCH_CONFIG_REGISTRY["fast_weight_transformer"](args)
    return registered.MODEL_REGISTRY["fast_weight_transformer"].build_model(args, make_task(40)).eval()


def draw(*lengths):
    rows = [torch.cat([torch.randint(4, 40, (length - 1,)), torch.tensor([2])]) for length in lengths]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=1)
