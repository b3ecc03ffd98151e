"""The two tokens before each token, as causal convolutions read them, however the text was cut into segments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...mixers.parts.convolution import EarlierTokens
from ...ops.state import tensor_state

BEFORE = 2  # tokens that a convolution reads before its own


@tensor_state
class RecentState(NamedTuple):
    """The vectors of the last two tokens of a text, 0 where there was none."""

    vectors: Tensor  # (B,2,C), the last token first


def with_recent(
    p: Tensor, state: RecentState | None, padding_mask: Tensor | None = None, reset_mask: Tensor | None = None
) -> tuple[Tensor, RecentState]:
    """Maps p (T,B,C) to [p_t, p_{t-1}, p_{t-2}] (T,B,3C), with 0 before a text begins, and to the state after the last token.

    ``padding_mask`` (B,T): padding counts as no token. ``reset_mask`` (B,T): True at the first token of a new text.
    """
    recent = None if state is None else state.vectors.to(p).flip(1)
    earlier = EarlierTokens(p, recent, BEFORE, padding_mask, reset_mask)
    before = [earlier.in_place(earlier.back(tokens)) for tokens in range(1, BEFORE + 1)]
    return torch.cat([p, *before], -1), RecentState(earlier.recent().flip(1))
