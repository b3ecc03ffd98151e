"""The checked inputs of one call. Every stage of the operation takes ``Inputs`` and returns changed ones: ``checks`` makes them,
``operation`` masks them and adds the coefficients, ``normalisation`` what it accumulates, and ``dispatch`` runs them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..feature_maps import RowMap
from ..rules import Coefficients, Rule

READ_AND_ERASE, READ = "read_and_erase", "read"  # what attention normalisation divides


class Inputs(NamedTuple):
    """The arguments of ``fast_weight`` after their checks; ``coefficients`` follow from the gates."""

    q: Tensor  # (B,H,T,K) features, or (B,H,T,D) where ``row_map`` is still to be applied
    k: Tensor  # as q
    v: Tensor  # (B,H,T,V)
    rule: Rule
    gates: dict[str, Tensor]
    state: Any  # a FastWeightState; None until ``operation.start`` makes an empty one
    backend: str
    attention_norm: bool
    eps: float
    padding_mask: Tensor | None
    key_log_scale: Tensor | None
    reset_mask: Tensor | None
    row_map: RowMap
    width: int  # K, of the features
    decoding: bool
    group: Any  # a torch.distributed.ProcessGroup or None
    attention_norm_of: str
    dtype: torch.dtype  # of state and accumulation
    kernels: bool  # whether kernels are asked for: by the backend, or because the device has them
    coefficients: Coefficients = Coefficients()
    limits: list[int] | None = None  # where packed texts begin and end
    empty: bool = False  # whether the memories are zeros, of which kernels read none
    ends: bool = True  # whether the memory after the last token is asked for
    half: bool = False  # whether the caller's q, k and v are in fp16: what is made of them in fp32 is multiplied in tf32


def fill(x: Tensor, mask: Tensor, value: float) -> Tensor:
    """x (B,H,T) or (B,H,T,X) with ``value`` where mask (B,T) is True."""
    return x.masked_fill(mask[:, None] if x.dim() == 3 else mask[:, None, :, None], value)
