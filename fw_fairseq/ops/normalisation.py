"""Attention normalisation: the output divided by n_t . q_t, with n_t accumulated in fp32.

A rule whose normaliser follows its writes ("write") gets it as one more column of the memory, written with the value 1: the same
recurrence, whatever runs it. A rule whose normaliser sums its keys ("keys") gets it as a cumulative sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..rules import Coefficients
from .state import FastWeightState


def append_column(v: Tensor, state: FastWeightState) -> tuple[Tensor, Tensor]:
    """v and memory with the normaliser as their last column; v in the memory's dtype, so that the column is read back in it."""
    v = v.to(state.memory.dtype)
    memory = torch.cat([state.memory, state.normaliser.unsqueeze(-1)], dim=-1)
    return torch.cat([v, torch.ones_like(v[..., :1])], dim=-1), memory


def split_column(y: Tensor, memory: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised y, memory and normaliser from those with the column."""
    return y[..., :-1] / (y[..., -1:] + eps), memory[..., :-1], memory[..., -1]


def sum_keys(q: Tensor, k: Tensor, normaliser: Tensor, reset_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """n_t . q_t and n_{t-1} . k_t (B,H,T), and the last n (B,H,K), for n_t = n_{t-1} + k_t, from 0 again at each reset."""
    k = k.to(normaliser.dtype)
    sums = torch.cat([normaliser.unsqueeze(2), k], dim=2).cumsum(2)  # (B,H,T+1,K)
    before, after = sums[:, :, :-1], sums[:, :, 1:]
    if reset_mask is not None:
        steps = torch.arange(k.shape[2], device=k.device)
        last_reset = torch.where(reset_mask, steps, -1).cummax(-1).values  # (B,T), -1 where there was none
        forgotten = before.gather(2, last_reset.clamp(min=0)[:, None, :, None].expand_as(k))
        forgotten = forgotten.masked_fill((last_reset < 0)[:, None, :, None], 0)
        before, after = before - forgotten, after - forgotten
    return (after * q).sum(-1), (before * k).sum(-1), after[:, :, -1]


def normalise_erase(coefficients: Coefficients, recalled: Tensor, eps: float) -> Coefficients:
    """Erases what a normalised read of k_t gives. A key that nothing was written under erases nothing."""
    empty = recalled == 0
    e = torch.where(empty, 0.0, coefficients.e / (recalled.masked_fill(empty, 1.0) + eps))
    return coefficients._replace(e=e)


def rescale_writes(coefficients: Coefficients, key_log_scale: Tensor, log_scale: Tensor) -> tuple[Coefficients, Tensor]:
    """Keys that stand for k_t exp(key_log_scale_t), kept relative to the largest scale so far so that nothing overflows.

    The running maximum sees no later token. Its changes are one more scalar gate, exp(m_{t-1} - m_t) <= 1, and the write strength
    becomes exp(key_log_scale_t - m_t) <= 1. The maximum itself carries no gradient: outputs do not depend on it.
    """
    scale = torch.cat([log_scale.unsqueeze(-1), key_log_scale], dim=-1)
    running = scale.detach().cummax(-1).values
    seen = running.masked_fill(running == -torch.inf, 0.0)
    shrink = torch.where(running[..., :-1] == -torch.inf, 1.0, (running[..., :-1] - seen[..., 1:]).exp())
    strength = (key_log_scale - seen[..., 1:]).exp()
    f = shrink if coefficients.f is None else coefficients.f * shrink
    w = strength if coefficients.w is None else coefficients.w * strength
    return coefficients._replace(f=f, w=w), running[..., -1]
