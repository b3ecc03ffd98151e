"""The shared part of mixers that pool the past: their windows, their projections, and the form that was published."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Mistake
from .base import Mixer
from .options import MixerOptions

LEAP_WINDOWS = "leap"


def layer_window(config: MixerOptions, layer: int, layers: int) -> int:
    """Returns how many tokens the mixer of a layer sees; 0 means all of them.

    ``config.longest_text``, where it is there, is the number of tokens that no text exceeds: a window of as many is all of them.
    """
    window = named_window(config, layer, layers)
    longest = config.longest_text
    return 0 if longest is not None and window >= longest else window


def named_window(config: MixerOptions, layer: int, layers: int) -> int:
    """Returns the window of a layer that --window-sizes names."""
    named = config.window_sizes
    if not named:
        return 0 if layer == layers - 1 else 4 * 2**layer
    if named == LEAP_WINDOWS:
        return 4 * 2 ** (layer % 4 - 1) if layer % 4 else 0
    sizes = [part.strip() for part in named.split(",")]
    for part in sizes:
        if not part.isdecimal():
            raise Mistake(f"--window-sizes has {part!r}; each part must be a number of tokens, or 0 for all before")
    if len(sizes) not in (1, layers):
        raise Mistake(f"--window-sizes has {len(sizes)} numbers but the model has {layers} layers; give one, or one per layer")
    return int(sizes[layer if len(sizes) > 1 else 0])


class Pooled(Mixer):
    """A mixer that pools the last ``window`` tokens, or all of the past for 0.

    Its projection makes ``parts`` vectors. Two vectors of each token are pooled, in ``poolings`` rounds.
    """

    takes_source = takes_keep_state = True
    parts: int
    out_proj: Any
    poolings: int
    settings = ("pooling_form", "pooling_dropout")
    options = (*settings, "window_sizes")

    def __init__(self, embed_dim: int, heads: int, config: Any, window: int, **given) -> None:
        super().__init__(embed_dim, heads)
        settings = self.read_settings(config, given)
        self.window, self.published = window, str(settings.pooling_form) == "published"
        self.dropout = nn.Dropout(settings.pooling_dropout)
        self.in_proj = nn.Linear(embed_dim, self.parts * embed_dim, bias=False)

    @classmethod
    def of_layer(cls, embed_dim: int, num_heads: int, config: Any, layer: int, layers: int) -> Pooled:
        return cls(embed_dim, num_heads, config, layer_window(config, layer, layers))

    def state_size(self) -> int:
        return (self.window - 1 if self.window else 1) * (2 * self.embed_dim + self.poolings * self.num_heads)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for weight in self.in_proj.weight.chunk(self.parts):
            nn.init.xavier_uniform_(weight, gain=1 / math.sqrt(2))
        if self.out_proj is not None:
            nn.init.xavier_uniform_(self.out_proj.weight)

    def scaled_product(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the products of vectors (...,D) divided by sqrt(D), (...)."""
        return (x * y).sum(-1) * self.head_dim**-0.5
