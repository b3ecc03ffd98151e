"""What padding and the beginning of a new text are for the recurrence: at padding nothing is written, erased or lost; a new text
begins by losing everything."""

from __future__ import annotations

import torch
from torch import Tensor

from ..row_map import AS_IS, RowMap
from ..rules import Coefficients


def at(mask: Tensor, x: Tensor | None, value: float) -> Tensor | None:
    """x (B,H,T) or (B,H,T,X) with ``value`` where mask (B,T) is True."""
    return None if x is None else x.masked_fill(mask[:, None] if x.dim() == 3 else mask[:, None, :, None], value)


def pause(coefficients: Coefficients, padding_mask: Tensor, q: Tensor, row_map: RowMap) -> Coefficients:
    """At padding nothing decays. Where k = 0 nothing is written or erased either; features of 0 have to be told."""
    f, z, e, w = coefficients
    f, z = at(padding_mask, f, 1), at(padding_mask, z, 1)
    if row_map != AS_IS:
        e, w = at(padding_mask, e, 0), at(padding_mask, ones(q) if w is None else w, 0)
    return Coefficients(f, z, e, w)


def forget(coefficients: Coefficients, reset_mask: Tensor, q: Tensor) -> Coefficients:
    return coefficients._replace(f=at(reset_mask, ones(q) if coefficients.f is None else coefficients.f, 0))


def ones(q: Tensor) -> Tensor:
    return torch.ones(q.shape[:3], device=q.device, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
