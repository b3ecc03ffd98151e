"""The weight of each token in what a later one reads, by layer and head."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import Mistake
from ...mixers import MIXERS

EXPECTED = 5  # words


class Part(NamedTuple):
    """The weights of all tokens in one operation of one layer's mixer."""

    layer: int  # from 1, bottom first
    mixer: str
    what: str
    heads: Tensor  # (heads,T)
    window: int = 0  # how many tokens the last one may read from; 0: all of them

    def name(self) -> str:
        return f"layer {self.layer}, {self.mixer}: {self.what}"

    def outside(self) -> int:
        """Returns the number of tokens before the window, which begin the text."""
        return max(0, self.heads.shape[1] - self.window) if self.window else 0

    def sizes(self) -> Tensor:
        """Returns the mean over heads of the weights' absolute values (T,), in which heads of opposite sign do not cancel."""
        return self.heads.abs().mean(0)


class Reading(NamedTuple):
    """The weights of the tokens that one token reads, and the numbers of the words that the model expects after it."""

    reader: int
    parts: list[Part]
    expected: list[tuple[int, float]]  # and their probabilities


def relative(weights: Tensor) -> Tensor:
    """Returns weights (..., T) divided by the largest absolute weight of each row."""
    return weights / weights.abs().amax(-1, keepdim=True).clamp(min=1e-30)


@torch.no_grad()
def explain(model: Any, tokens: Tensor, readers: list[int]) -> list[Reading]:
    """Returns the weights of all tokens up to each reader in what it reads, for each layer, and what the model expects after it."""
    from ...patches.non_finite import NotFinite, why_not_finite  # which makes the options, whose choices a user directory adds to

    limit = model.max_positions()
    if len(tokens) > limit:
        first = model.decoder.dictionary[int(tokens[0])]
        raise Mistake(f"TEXT has {len(tokens)} tokens, {first} included; the model takes at most {limit}")
    seen: dict[int, Tensor] = {}
    layers = list(model.decoder.layers.children())
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda _, args, kwargs, i=i: seen.update({i: kwargs["query"]}), with_kwargs=True)
        for i, layer in enumerate(layers)
    ]
    try:
        output = model(tokens[None])
    finally:
        for hook in hooks:
            hook.remove()
    if output[0].isnan().any():
        raise NotFinite(f"the model's scores are NaN; {why_not_finite(model)}")
    found = []
    for reader in readers:
        parts = [part for i, layer in enumerate(layers) for part in parts_of(layer.self_attn, seen[i][: reader + 1], i + 1)]
        found.append(Reading(reader, parts, expected(model, output, reader)))
    return found


def parts_of(module: Any, x: Tensor, layer: int) -> list[Part]:
    """Returns the weights at the last of x (T,1,C) in one layer's mixer or softmax attention."""
    if getattr(module, "source", None) is not None:
        raise Mistake("fw-explain cannot say what a layer with --qkv-sparsity reads of which token: its keys mix three tokens")
    mixer = getattr(module, "mixer", None)
    if mixer is None:
        return [Part(layer, "softmax", "attention", attention(module, x).float())]
    name = next(name for name, kind in MIXERS.items() if kind is type(mixer))
    return [Part(layer, name, what, heads.float(), window_of(mixer, what, len(x))) for what, heads in mixer.explain(x).items()]


def window_of(mixer: Any, what: str, tokens: int) -> int:
    """Returns how many of all tokens the last one may read from, itself among them; 0 means all of them."""
    if what == "attention":
        return mixer.reach.window(tokens)
    return getattr(mixer, "window", 0)


def expected(model: Any, output: Any, reader: int) -> list[tuple[int, float]]:
    """Returns the most probable next words after the reader and their probabilities."""
    chances = model.get_normalized_probs((output[0][:, [reader]], output[1]), log_probs=False, sample=None)[0, 0]
    best = chances.topk(min(EXPECTED, len(chances)))
    return list(zip(best.indices.tolist(), best.values.tolist()))


def attention(module: Any, x: Tensor) -> Tensor:
    """Returns the last token's attention weights (heads, T) for x (T, 1, C); fairseq itself returns only their mean over heads."""
    q, k = module.q_proj(x[-1, 0]) * module.scaling, module.k_proj(x[:, 0])
    return torch.einsum("hx,thx->ht", q.unflatten(-1, (module.num_heads, -1)), k.unflatten(-1, (module.num_heads, -1))).softmax(-1)
