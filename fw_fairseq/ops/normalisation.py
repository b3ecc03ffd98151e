"""Attention normalisation: the output divided by n_t . q_t, with n_t accumulated in fp32.

A rule whose normaliser follows its writes ("write") gets it as one more column of the memory, written with the value 1: the same
recurrence, whatever runs it. A rule whose normaliser sums its keys ("keys") gets it as a cumulative sum.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..rules import Coefficients
from .chunkwise.frames import SMALLEST_GATE
from .state import FastWeightState

EPS = 1e-6
SCALED_EPS = 1e-30  # for features at most 1, whose products can be that small; fp32 holds its inverse times any value


def append_column(v: Tensor, state: FastWeightState) -> tuple[Tensor, Tensor]:
    """v and memory with the normaliser as their last column; v in the memory's dtype, so that the column is read back in it."""
    v = v.to(state.memory.dtype)
    memory = torch.cat([state.memory, state.normaliser.unsqueeze(-1)], dim=-1)
    return torch.cat([v, torch.ones_like(v[..., :1])], dim=-1), memory


def split_column(y: Tensor, memory: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised y, memory and normaliser from those with the column."""
    return divide(y[..., :-1], y[..., -1:], eps), memory[..., :-1], memory[..., -1]


def divide(y: Tensor, read: Tensor, eps: float) -> Tensor:
    """y / (read + eps). Where nothing is read y is 0, and so is the quotient, with a gradient that is finite whatever eps is."""
    return y / (read + eps).masked_fill(read == 0, max(eps, EPS))


def sum_keys(q: Tensor, k: Tensor, normaliser: Tensor, reset_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """n_t . q_t and n_{t-1} . k_t (B,H,T), and the last n (B,H,K), for n_t = n_{t-1} + k_t, from 0 again at each reset."""
    k = k.to(normaliser.dtype)
    terms = torch.cat([normaliser.unsqueeze(2), k], dim=2)
    sums = terms.cumsum(2) if reset_mask is None else sum_texts(terms, F.pad(reset_mask, (1, 0)))
    before, after = sums[:, :, :-1], sums[:, :, 1:]
    if reset_mask is not None:
        before = before.masked_fill(reset_mask[:, None, :, None], 0)
    return (after * q).sum(-1), (before * k).sum(-1), after[:, :, -1].clone()  # not the others with it


def sum_texts(terms: Tensor, reset_mask: Tensor) -> Tensor:
    """Sums (B,H,T,K) over the terms since the last reset, (B,T); twice as many terms at each step, none of another text."""
    text, reach, tokens = reset_mask.cumsum(1), 1, terms.shape[2]
    while reach < tokens:
        same = (text[:, reach:] == text[:, :-reach])[:, None, :, None]
        terms = terms + F.pad(torch.where(same, terms[:, :, :-reach], 0.0), (0, 0, reach, 0))
        reach *= 2
    return terms


def normalise_erase(coefficients: Coefficients, recalled: Tensor, eps: float) -> Coefficients:
    """Erases what a normalised read of k_t gives. A key that nothing was written under erases nothing."""
    empty = recalled == 0
    e = torch.where(empty, 0.0, coefficients.e / (recalled.masked_fill(empty, 1.0) + eps))
    return coefficients._replace(e=e)


def rescale_writes(
    coefficients: Coefficients, key_log_scale: Tensor, log_scale: Tensor, left: Tensor
) -> tuple[Coefficients, Tensor]:
    """Keys that stand for k_t exp(key_log_scale_t), kept relative to m_t, the largest scale that is left: nothing overflows.

    m_t sees no later token. Its changes are one more scalar gate, which with f is at most 1, and the write strength becomes
    exp(key_log_scale_t - m_t) <= 1. It carries no gradient: outputs do not depend on it.
    """
    running = running_scale(key_log_scale, left, log_scale)
    seen = running.masked_fill(running == -torch.inf, 0.0)
    before, now = running[..., :-1], seen[..., 1:]
    nothing = (before == -torch.inf) | (left == -torch.inf)
    shrink = torch.where(nothing, 1.0, (before - now).exp()).to(log_scale.dtype)
    strength = (key_log_scale - now).exp().to(log_scale.dtype)
    f = shrink if coefficients.f is None else coefficients.f * (shrink if coefficients.f.dim() == 3 else shrink.unsqueeze(-1))
    w = strength if coefficients.w is None else coefficients.w * strength
    return coefficients._replace(f=f, w=w), running[..., -1].to(log_scale.dtype)


def log_left(f: Tensor | None, key_log_scale: Tensor, reset_mask: Tensor | None) -> Tensor:
    """(B,H,T) in float64, without gradients: log of what a token leaves of the writes before it, in the channel that keeps most."""
    if f is None:
        left = torch.zeros_like(key_log_scale, dtype=torch.float64)
    else:
        most = (f if f.dim() == 3 else f.amax(-1)).detach().double()
        left = most.clamp(min=SMALLEST_GATE).log().masked_fill(most == 0, -torch.inf)
    return left if reset_mask is None else left.masked_fill(reset_mask[:, None], -torch.inf)


def running_scale(key_log_scale: Tensor, left: Tensor, start: Tensor) -> Tensor:
    """m_t = max(m_{t-1} + left_t, key_log_scale_t), from m_0 = start (B,H) on: (B,H,T+1) in float64."""
    scale = torch.cat([start.unsqueeze(-1), key_log_scale.detach()], dim=-1).double()
    known = scale.nan_to_num(neginf=0.0)
    left = left.masked_fill(left == -torch.inf, known.min() - known.max() - 1)  # enough for no scale to outlive its text
    lost = F.pad(left.cumsum(-1), (1, 0))
    return lost + (scale - lost).cummax(-1).values
