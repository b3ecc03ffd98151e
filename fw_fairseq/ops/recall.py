"""What queries after the last token read: the weight of each token in it, and no memory at any time.

The query is taken back through the tokens instead of the tokens forward through the memory: O(T (K + Q)) numbers where the memory
has K V, and the weights are those that each value has in the answer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rules import Coefficients

SMALLEST_GATE = 1e-30  # smaller ones count as this


def recall(q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """q (B,H,Q,K), k (B,H,T,K), v (B,H,T,V) -> y (B,H,Q,V), weights (B,H,Q,T); y = weights v where no gate decays values.

    From an empty memory. A rule with an erase has at most one decay gate per token.
    """
    f, z, e, w = coefficients
    if e is not None and (z is not None or (f is not None and f.dim() == 4)):
        raise ValueError("recall has no form for an erase with per-channel decay; use fast_weight")
    left = None if f is None else until_end(f)
    if e is None:
        weights = q @ (k if left is None else k * (left if left.dim() == 4 else left.unsqueeze(-1)).exp()).mT
    else:
        weights = after_erasures(q, k, left, e)
    weights = weights if w is None else weights * w.unsqueeze(-2)
    return weights @ (v if z is None else v * until_end(z).exp()), weights


def until_end(gate: Tensor) -> Tensor:
    """Log of the product of all later gates, (B,H,T) or (B,H,T,X)."""
    logs = gate.clamp(min=SMALLEST_GATE).log()
    return logs.flip(2).cumsum(2).flip(2) - logs


def after_erasures(q: Tensor, k: Tensor, left: Tensor | None, e: Tensor) -> Tensor:
    """(B,H,Q,T): the solution a of a (I + L) = q K^T, L_ts the strength with which token t erases what s wrote."""
    erase = (e.unsqueeze(-1) * (k @ k.mT)).tril(-1)
    scores = q @ k.mT
    if left is not None:
        erase = erase * (left.unsqueeze(-2) - left.unsqueeze(-1)).tril(-1).exp()
        scores = scores * left.unsqueeze(-2).exp()
    unit = erase + torch.eye(erase.shape[-1], dtype=erase.dtype, device=erase.device)
    return torch.linalg.solve_triangular(unit, scores, upper=False, left=False, unitriangular=True)
