"""What mixers that attend to the last tokens share: which tokens each one sees, in whatever segments they came."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.state import state as state_type


@state_type
class WindowState(NamedTuple):
    memory: Tensor  # (B,R,X): what is read of the last R tokens
    filled: Tensor  # (B,R), False where there was none


class View(NamedTuple):
    """T tokens and the S - T before them."""

    tokens: Tensor  # (B,S,X)
    seen: Tensor  # (B,T,S)
    distance: Tensor  # (B,T,S): how many tokens back, where seen


def look_back(x: Tensor, state: WindowState | None, size: int, padding_mask, reset_mask) -> tuple[View, WindowState]:
    """x (B,T,X); each token sees itself and the ``size`` before it, of its own text."""
    batch, total = x.shape[:2]
    real = torch.ones(batch, total, dtype=torch.bool, device=x.device) if padding_mask is None else ~padding_mask
    texts = torch.zeros_like(real, dtype=torch.long) if reset_mask is None else reset_mask.long().cumsum(1)
    if state is not None:
        x, real = torch.cat([state.memory.to(x), x], 1), torch.cat([state.filled, real], 1)
        texts = F.pad(texts, (size, 0))
    order, place = torch.arange(x.shape[1], device=x.device), real.long().cumsum(1)  # padding takes no place
    distance = place[:, -total:, None] - place[:, None]
    before, itself = order[-total:, None] >= order, order[-total:, None] == order
    same_text = texts[:, -total:, None] == texts[:, None]
    seen = itself | ((distance <= size) & before & real[:, None] & same_text)  # padding itself: a softmax needs something to see
    real = real & (texts == texts[:, -1:])
    missing = max(0, size - x.shape[1])
    kept, filled = F.pad(x, (0, 0, missing, 0)), F.pad(real, (missing, 0))
    last = filled.long().argsort(dim=1, stable=True)[:, -size:]
    state = WindowState(kept.gather(1, last[..., None].expand(-1, -1, x.shape[2])), filled.gather(1, last))
    return View(x, seen, distance), state
