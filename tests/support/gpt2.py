"""A tiny GPT-2 as transformers saves it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode

sys.modules.setdefault("torchaudio", None)  # fairseq's, of another torch than ours: transformers would trip over it
transformers = pytest.importorskip("transformers")


TEXT = "the other thing is there"


MERGES = ["t h", "th e", "Ġ the"]


END = "<|endoftext|>"


def save_gpt2(folder: Path):
    """Save a GPT-2 of random numbers with a tokenizer of bytes and three merges; its end of text is not its last token."""
    tokens = [*bytes_to_unicode().values(), END, *(merge.replace(" ", "") for merge in MERGES)]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES, ""]))
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=len(tokens), n_positions=24, n_embd=32, n_layer=2, n_head=4, bos_token_id=256, eos_token_id=256
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, x in model.named_parameters():
            x.add_(torch.randn_like(x) * (0.02 if "wte" in name else 0.1))
    model.save_pretrained(folder)
    return model
