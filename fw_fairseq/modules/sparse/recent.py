"""The two tokens before each token, as causal convolutions read them, however the text was cut into segments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

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
    _, batch, width = p.shape
    first = p.new_zeros(BEFORE, batch, width) if state is None else state.vectors.to(p).transpose(0, 1).flip(0)
    every = torch.cat([first, p])  # (T+2,B,C)
    if padding_mask is None and reset_mask is None:
        return torch.cat([every[2:], every[1:-1], every[:-2]], -1), RecentState(every[-BEFORE:].flip(0).transpose(0, 1))
    one, two, texts = earlier_places(len(p), batch, padding_mask, reset_mask, p.device)
    parts = [p]
    for place in (one, two):  # (B,T+1): of each token, and of the one that follows
        same = texts.gather(1, place) == F.pad(texts[:, BEFORE:], (0, 1), mode="replicate")
        found = every.gather(0, place.t()[..., None].expand(-1, -1, width))
        parts.append(found.masked_fill(~same.t()[..., None], 0))
    return torch.cat([p, *(part[:-1] for part in parts[1:])], -1), RecentState(torch.stack([part[-1] for part in parts[1:]], 1))


def earlier_places(total: int, batch: int, padding_mask, reset_mask, device) -> tuple[Tensor, Tensor, Tensor]:
    """The places, among two earlier tokens and the T tokens, of the last token and the last but one before each of them and before
    the next token, (B,T+1) each, and the number of each place's text, (B,T+2)."""
    nothing = torch.zeros(batch, total, dtype=torch.bool, device=device)
    padding_mask = nothing if padding_mask is None else padding_mask
    texts = F.pad((nothing if reset_mask is None else reset_mask).long().cumsum(1), (BEFORE, 0))
    order = F.pad(padding_mask, (BEFORE, 0)).long().argsort(dim=1, stable=True)  # the places that are tokens, then padding
    tokens = (~padding_mask).long().cumsum(1)
    before = F.pad(tokens, (1, 0))  # how many of the T tokens come before each one, and before the next token
    return order.gather(1, before + 1), order.gather(1, before), texts
