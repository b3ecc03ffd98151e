"""A batch of prompts of unequal length, at the cost of their own tokens.

The prompts are sorted by length and cut into groups of like length, and each group is one pass, so that short prompts are not
padded to the longest one. The states are joined after the last token of each prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..ops.parallel.packing import cut
from ..ops.state import joined


def read(x: Tensor, padding: Tensor, through: Callable) -> tuple[Tensor, dict[int, object]]:
    """Maps the embeddings x (B,T,C) of prompts to the last hidden vectors (B,T,C) and the states of the layers.

    padding: (B,T), on either side. After its last token, a prompt keeps that token's vector, from which ``generate`` goes on.
    through: maps (b,t,C) and padding (b,t), or None, to (b,t,C) and the states.
    """
    real = ~padding
    order = real.long().argsort(dim=1, stable=True)  # a row's own tokens come last
    lengths = real.sum(1).tolist()
    out, states, groups = torch.zeros_like(x), [], cut(lengths)
    for rows in groups:
        count = max(1, *(lengths[row] for row in rows))
        row = torch.tensor(rows, device=x.device)[:, None]
        places = order[row[:, 0], -count:]
        hidden = padding[row, places]
        y, found = through(x[row, places], hidden if hidden.any() else None)
        out[row, places] = y.to(out.dtype)
        states.append(found)
    back = torch.tensor([row for rows in groups for row in rows], device=x.device).argsort()
    together = {i: joined([found[i] for found in states]).index_select(back) for i in states[0]}
    return carried(out, real), together


def carried(x: Tensor, real: Tensor) -> Tensor:
    """Returns x (B,T,C) with the vector of a row's last real token, (B,T), at the padding after it."""
    steps = torch.arange(x.shape[1], device=x.device)
    last = torch.where(real, steps, 0).cummax(1).values
    return x.gather(1, last[..., None].expand_as(x))
