"""The reads of queries after the last token, without a memory: the weight that each token has in them.

The query is taken back through the tokens instead of the tokens forward through the memory: O(T (K + Q)) numbers where the memory
has K V. The answer is linear in the values, and the weights are its coefficients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...rules import Coefficients
from .frames import CHUNK, at_least_smallest

SMALLEST_LOGGED = 1e-30  # the gate whose log stands for that of 0; fp32 holds it


def recall(q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
    """The reads y (B,H,Q,V) and the weights (B,H,Q,T) of each token in them, for a memory that was empty before the first token.

    q (B,H,Q,K), k (B,H,T,K), v (B,H,T,V). y = weights v; with a value-side decay z, each value first loses what z takes until the
    end. There is a form for every rule whose erasing coefficient e is one number for each token and head.
    """
    f, z, e, w = coefficients
    left = None if f is None or (e is not None and f.dim() == 4) else until_end(f)
    if e is None:
        weights = q @ (k if left is None else k * (left if left.dim() == 4 else left.unsqueeze(-1)).exp()).mT
    elif f is not None and f.dim() == 4:
        weights = after_erasures_and_decay(q, k, f, e)
    else:
        weights = after_erasures(q, k, left, e)
    weights = weights if w is None else weights * w.unsqueeze(-2)
    return weights @ (v if z is None else v * until_end(z).exp()), weights


def until_end(gate: Tensor) -> Tensor:
    """The log of the product of all later gates, (B,H,T) or (B,H,T,X)."""
    logs = gate.clamp(min=SMALLEST_LOGGED).log()
    return logs.flip(2).cumsum(2).flip(2) - logs


def after_erasures(q: Tensor, k: Tensor, left: Tensor | None, e: Tensor) -> Tensor:
    """(B,H,Q,T): the solution a of a (I + L) = q K^T, L_ts the strength with which token t erases what s wrote. ``left`` (B,H,T):
    ``until_end`` of one gate per token."""
    erase = (e.unsqueeze(-1) * (k @ k.mT)).tril(-1)
    scores = q @ k.mT
    if left is not None:
        erase = erase * (left.unsqueeze(-2) - left.unsqueeze(-1)).tril(-1).exp()
        scores = scores * left.unsqueeze(-2).exp()
    return solve(scores, erase)


def after_erasures_and_decay(q: Tensor, k: Tensor, f: Tensor, e: Tensor) -> Tensor:
    """The same with one gate per channel, f (B,H,T,K): a chunk at a time, the last one first, so that the products of gates stay in
    the range of float64 (docs/chunk_form.md)."""
    dtype = q.dtype
    q, weights = q.double(), []
    for k_c, f_c, e_c in reversed(list(zip(*(x.double().split(CHUNK, dim=2) for x in (k, f, e))))):
        products = at_least_smallest(f_c).cumprod(2)
        left = products[:, :, -1:] / products  # of each token at the end of the chunk
        written, read = k_c * left, k_c / left
        erase = (e_c.unsqueeze(-1) * (read @ written.mT)).tril(-1)
        weights.append(solve(q @ written.mT, erase))
        q = (q - (weights[-1] * e_c.unsqueeze(-2)) @ read) * products[:, :, -1:]
    return torch.cat(weights[::-1], -1).to(dtype)


def solve(scores: Tensor, erase: Tensor) -> Tensor:
    """The solution a of a (I + erase) = scores, erase (B,H,T,T) below the diagonal."""
    return torch.linalg.solve_triangular(erase, scores, upper=False, left=False, unitriangular=True)
