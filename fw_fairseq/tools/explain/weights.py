"""The weight of each token in what the last one reads, by layer and head."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ... import Mistake
from ...files import reading
from ...mixers import MIXERS

START = "</s>"  # what every text begins after


class Part(NamedTuple):
    """The weights of all tokens in one operation of one layer's mixer."""

    layer: int  # from 1, bottom first
    mixer: str
    what: str
    heads: Tensor  # (heads,T)

    def name(self) -> str:
        return f"layer {self.layer}, {self.mixer}: {self.what}"

    def mean(self) -> Tensor:
        """Returns the mean over heads, each relative to its largest weight."""
        return relative(self.heads).mean(0)


def relative(weights: Tensor) -> Tensor:
    """Returns weights (..., T) divided by the largest absolute weight of each row."""
    return weights / weights.abs().amax(-1, keepdim=True).clamp(min=1e-30)


def read_text(text: str, dictionary) -> tuple[list[str], Tensor]:
    """Returns tokens and their numbers (T,), with the symbol that every text begins with. ``text``: a sentence or a file's name."""
    if os.path.isfile(text):  # which Path.is_file does not answer for a sentence too long for a name
        with reading(Path(text), "a text"):
            text = Path(text).read_text(encoding="utf-8")
    words = text.split()
    if not words:
        raise Mistake("TEXT has no words")
    return [START, *words], torch.tensor([dictionary.eos(), *map(dictionary.index, words)])


@torch.no_grad()
def explain(model, tokens: Tensor) -> list[Part]:
    """Returns the weights of all tokens (T,) in what the last one reads, for each layer."""
    limit = model.max_positions()
    if len(tokens) > limit:
        raise Mistake(f"TEXT has {len(tokens)} tokens, {START} included; the model takes at most {limit}")
    seen: dict[int, Tensor] = {}
    layers, names = list(model.decoder.layers), {kind: name for name, kind in MIXERS.items()}
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda _, args, kwargs, i=i: seen.update({i: kwargs["query"]}), with_kwargs=True)
        for i, layer in enumerate(layers)
    ]
    try:
        model(tokens[None])
    finally:
        for hook in hooks:
            hook.remove()
    found = []
    for i, layer in enumerate(layers):
        mixer = getattr(layer.self_attn, "mixer", None)
        name = "softmax" if mixer is None else names[type(mixer)]
        weights = {"attention": attention(layer.self_attn, seen[i])} if mixer is None else mixer.explain(seen[i])
        found += [Part(i + 1, name, what, heads.float()) for what, heads in weights.items()]
    return found


def attention(module, x: Tensor) -> Tensor:
    """Returns the last token's attention weights (heads, T) for x (T, 1, C); fairseq itself returns only their mean over heads."""
    q, k = module.q_proj(x[-1, 0]) * module.scaling, module.k_proj(x[:, 0])
    return torch.einsum("hx,thx->ht", q.unflatten(-1, (module.num_heads, -1)), k.unflatten(-1, (module.num_heads, -1))).softmax(-1)
