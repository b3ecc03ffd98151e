"""Tiny decoders of transformers with random weights, and pretrained_lm around them."""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from dataclasses import asdict

import pytest
import torch
from fairseq import models as registered
from fairseq.data import Dictionary

sys.modules.setdefault("torchaudio", None)  # fairseq's, of another torch than ours: transformers would trip over it
transformers = pytest.importorskip("transformers")

from fw_fairseq.models.pretrained_lm import PretrainedLanguageModelConfig  # noqa: E402
from fw_fairseq.pretrained import folders  # noqa: E402

WORDS, WIDTH, LAYERS, HEADS, GROUPS, POSITIONS = 50, 32, 3, 4, 2, 64
SPECIAL = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 7}
SHAPE = {
    "hidden_size": WIDTH, "intermediate_size": 40, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "max_position_embeddings": POSITIONS, **SPECIAL,
}  # fmt: skip
GROUPED = {**SHAPE, "num_key_value_heads": GROUPS}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=12),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, sliding_window=6),
    "pythia": lambda: transformers.GPTNeoXConfig(**SHAPE),
    "opt": lambda: transformers.OPTConfig(**SHAPE, ffn_dim=40, word_embed_proj_dim=WIDTH, pad_token_id=0, dropout=0.0),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=POSITIONS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        **SPECIAL,
    ),
    "gemma": lambda: transformers.GemmaConfig(**{**GROUPED, "num_key_value_heads": 1}, head_dim=16),
}
ARCHITECTURES = [*CONFIGS]


def make(name: str):
    """A model whose weights are far from their start, where attention hardly depends on queries and keys."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    return stirred(model, 0.15)


@torch.no_grad()
def stirred(module, size: float):
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter) * size)
    return module


def dictionary_of(model) -> Dictionary:
    dictionary = Dictionary()
    for symbol in folders.symbols_of(model.config):
        dictionary.add_symbol(symbol)
    return dictionary


def build(library, monkeypatch, **options):
    """pretrained_lm around a copy of the library's model."""
    monkeypatch.setattr(folders, "load_model", lambda folder: copy.deepcopy(library))
    dictionary = dictionary_of(library)
    task = Namespace(source_dictionary=dictionary, target_dictionary=dictionary)
    args = Namespace(**{**asdict(PretrainedLanguageModelConfig()), "pretrained": "FOLDER", **options})
    return registered.MODEL_REGISTRY["pretrained_lm"].build_model(args, task).eval()


def symbols(model, tokens):
    """fairseq's symbols of the library's tokens."""
    found = {int(token): symbol for symbol, token in enumerate(model.decoder.tokens.tolist()) if model.decoder.known[symbol]}
    return torch.tensor([[found[int(token)] for token in row] for row in tokens])


def texts(rows: int = 2, count: int = 20) -> torch.Tensor:
    """Tokens, those among them that the special symbols stand for."""
    drawn = torch.randint(WORDS, (rows, count), generator=torch.Generator().manual_seed(0))
    drawn[0, 3:5] = torch.tensor([1, 7])
    return drawn
