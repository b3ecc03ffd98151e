"""The checked inputs of one call, and how padding and resets enter them.

Every stage of the operation takes ``Inputs`` and returns changed ones: ``checks`` makes them, this file masks them,
``normalisation`` adds what it accumulates, ``dispatch`` runs them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..feature_maps import AS_IS, RowMap
from ..rules import Coefficients, Rule
from .state import FastWeightState

READ_AND_ERASE, READ = "read_and_erase", "read"  # what attention normalisation divides


class Inputs(NamedTuple):
    """The arguments of ``fast_weight`` after their checks; ``coefficients`` follow from the gates."""

    q: Tensor  # (B,H,T,K) features, or (B,H,T,D) where ``row_map`` is still to be applied
    k: Tensor  # as q
    v: Tensor  # (B,H,T,V)
    rule: Rule
    gates: dict[str, Tensor]
    state: FastWeightState | None  # None: an empty memory, until ``start`` makes one
    backend: str
    attention_norm: bool
    eps: float
    padding_mask: Tensor | None
    key_log_scale: Tensor | None
    reset_mask: Tensor | None
    row_map: RowMap
    decoding: bool
    group: object  # a torch.distributed.ProcessGroup or None
    attention_norm_of: str = READ_AND_ERASE
    coefficients: Coefficients = Coefficients()

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(B, H, T, K, V), K after the feature map."""
        return (*self.q.shape[:3], self.row_map.width(self.q.shape[3]), self.v.shape[3])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of state and accumulation."""
        return torch.float64 if self.q.dtype == torch.float64 else torch.float32

    def mapped(self) -> Inputs:
        """The same with features in place of the rows that they are made of. With attention normalisation they are in fp32 where
        the rows are in fp16, which does not hold the gradient of a small divisor."""
        if self.row_map == AS_IS:
            return self
        half = self.attention_norm and self.q.dtype == torch.float16
        q, k = (self.row_map(x.float() if half else x) for x in (self.q, self.k))
        return self._replace(q=q, k=k, row_map=AS_IS)


def fill(x: Tensor | None, mask: Tensor, value: float) -> Tensor | None:
    """x (B,H,T) or (B,H,T,X) with ``value`` where mask (B,T) is True."""
    return None if x is None else x.masked_fill(mask[:, None] if x.dim() == 3 else mask[:, None, :, None], value)


def hide_padded_rows(inputs: Inputs) -> Inputs:
    """At padding the rows of q and k that features are made of are 0: features of NaN would have a gradient of NaN."""
    if inputs.padding_mask is None:
        return inputs
    q, k = (
        fill(x, inputs.padding_mask.repeat_interleave(x.shape[2] // inputs.padding_mask.shape[1], 1), 0)
        for x in (inputs.q, inputs.k)
    )
    return inputs._replace(q=q, k=k)


def hide_padding(inputs: Inputs) -> Inputs:
    """At padding q, k and v are 0 and every gate is 1, whatever was there."""
    mask = inputs.padding_mask
    if mask is None:
        return inputs
    q, k, v = (fill(x, mask, 0) for x in (inputs.q, inputs.k, inputs.v))
    gates = {name: fill(gate, mask, 1) for name, gate in inputs.gates.items()}
    return inputs._replace(q=q, k=k, v=v, gates=gates, key_log_scale=fill(inputs.key_log_scale, mask, -torch.inf))


def with_coefficients(inputs: Inputs) -> Inputs:
    """The rule's coefficients of the gates. At padding nothing decays, is erased or written; at a reset nothing is left."""
    dtype = inputs.state.memory.dtype
    gates = {name: gate.to(dtype) for name, gate in inputs.gates.items()}
    coefficients = inputs.rule.coefficients(**gates)
    if inputs.rule.key is not None:
        inputs = inputs._replace(k=inputs.rule.key(inputs.k, **gates))
    if inputs.padding_mask is not None:
        coefficients = pause(coefficients, inputs)
    if inputs.reset_mask is not None:
        f = ones(inputs) if coefficients.f is None else coefficients.f
        coefficients = coefficients._replace(f=fill(f, inputs.reset_mask, 0))
    return inputs._replace(coefficients=coefficients)


def pause(coefficients: Coefficients, inputs: Inputs) -> Coefficients:
    """A key of 0 neither writes nor erases. A feature map may make something else of 0, so there e and w are 0 too."""
    mask, (f, z, e, w) = inputs.padding_mask, coefficients
    f, z = fill(f, mask, 1), fill(z, mask, 1)
    if inputs.row_map != AS_IS:
        e, w = fill(e, mask, 0), fill(ones(inputs) if w is None else w, mask, 0)
    return Coefficients(f, z, e, w)


def ones(inputs: Inputs) -> Tensor:
    """(B,H,T), a coefficient that changes nothing."""
    return torch.ones(inputs.q.shape[:3], device=inputs.q.device, dtype=inputs.dtype)
