"""A memory of few tokens, kept as its factors, W = sum_s k_s u_s^T. Decoding starts with it.

S tokens take S (K + V) numbers instead of K V, which is less until S = K V / (K + V). Beam search copies them at every step.
Every rule of the recurrence keeps the form: decay shrinks the factors, an erase changes only what is written next.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..rules import Coefficients


class Factors(NamedTuple):
    """Takes the place of the memory ``dense()`` in a FastWeightState; shape, dtype and device are those of that memory."""

    keys: Tensor  # (B,H,S,K)
    values: Tensor  # (B,H,S,V)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.keys.shape[:2], self.keys.shape[3], self.values.shape[3]))

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def requires_grad(self) -> bool:
        return self.keys.requires_grad or self.values.requires_grad

    def index_select(self, dim: int, order: Tensor) -> Factors:
        return Factors(*(x.index_select(dim, order) for x in self))

    def detach(self) -> Factors:
        return Factors(*(x.detach() for x in self))

    def to(self, *args, **kwargs) -> Factors:
        return Factors(*(x.to(*args, **kwargs) for x in self))

    def dense(self) -> Tensor:
        """The memory (B,H,K,V)."""
        return self.keys.mT @ self.values

    def smallest(self) -> Factors | Tensor:
        """These factors, or the memory where that is no larger."""
        *_, tokens, key_width = self.keys.shape
        value_width = self.values.shape[3]
        return self if tokens * (key_width + value_width) < key_width * value_width else self.dense()


def no_factors(batch: int, heads: int, key_width: int, value_width: int, device: torch.device, dtype: torch.dtype) -> Factors:
    """An empty memory."""
    return Factors(*(torch.zeros(batch, heads, 0, width, device=device, dtype=dtype) for width in (key_width, value_width)))


def factored_form(q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients, memory: Factors) -> tuple[Tensor, Factors | Tensor]:
    """One token, q, k (B,H,1,K), v (B,H,1,V) -> y (B,H,1,V) in v's dtype, and the memory after it; computed in memory's dtype."""
    reads_apart = coefficients.e is not None and coefficients.e.dim() == 4  # an erase has a key of its own to read with
    f, z, e, w = (None if x is None else x if x.dim() == 4 else x.unsqueeze(-1) for x in coefficients)
    (keys, values), (q, k, update) = memory, (x.to(memory.dtype) for x in (q, k, v))
    if f is not None and f.shape[-1] == 1:
        values = values * f  # they are narrower than the keys
    elif f is not None:
        keys = keys * f
    if z is not None:
        values = values * z
    if w is not None:
        update = update * w
    if e is not None:
        update = update - (e @ keys.mT @ values if reads_apart else e * (k @ keys.mT @ values))
    keys, values = torch.cat([keys, k], dim=2), torch.cat([values, update], dim=2)
    return (q @ keys.mT @ values).to(v.dtype), Factors(keys, values).smallest()
