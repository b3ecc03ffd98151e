"""Rotary positions: pairs of features of queries and keys are turned by angles that grow with the position (Su et al. 2021)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...feature_maps import wide
from ...ops.checks import check_sequences
from ..look_back import places_in_texts

BASE = 10000.0


def positions(
    start: Tensor | None, tokens: Tensor, padding_mask: Tensor | None = None, reset_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the number of tokens before each token in its text, (B,T), and after the last one, (B,1).

    start: (B,1), those before the first; None: 0. tokens: (T,B,C), the tokens. Padding, (B,T), does not count, and a reset, (B,T),
    begins a text.
    """
    zeros = torch.zeros_like(tokens[..., 0], dtype=torch.long).T
    start = zeros[:, :1] if start is None else start
    check_sequences(start, zeros.shape[0])
    places, after = places_in_texts(start[:, 0], tokens.shape[0], padding_mask, reset_mask)
    return places, after[:, None]


def rotated(x: Tensor, place: Tensor) -> Tensor:
    """Maps x (B,H,T,K) at positions (B,T) to x with feature j and feature j + K/2 turned by place * BASE^(-2j/K). Angles are
    computed in float64, since streams have no end."""
    half = x.shape[-1] // 2
    speeds = BASE ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = place[:, None, :, None] * speeds
    first, second = wide(x).split(half, dim=-1)
    cos, sin = angles.cos().to(first.dtype), angles.sin().to(first.dtype)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1).to(x.dtype)
