"""The contract of a kernel family, which runs the recurrence over all tokens: what it gets, and what it says of itself.

A family is one Python module, beside its sources in ``cuda/``, that makes a ``Family``, and one entry in ``recurrence.FAMILIES``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from ...feature_maps import AS_IS, RowMap
from .compiler import Launcher


class Divided(NamedTuple):
    """Reads that attention normalisation divides by n_t . q_t + eps, or by ``least`` where n_t . q_t is 0."""

    eps: float
    least: float
    sums: Tensor | None  # (B,H,K) in fp32: n before the first token, None for 0; in the backward the place of its gradient, if any
    final: Tensor | None = None  # the place of n after the last token; in the backward its gradient, None for 0
    y: Tensor | None = None  # in the backward the divided reads


class Operands(NamedTuple):
    """One call of the recurrence.

    q, k (B,H,T,K) and v (B,H,T,V) have one dtype, fp32, bf16 or fp16; f, z, e, w are fp32, None where absent. The last dimension of
    all of them is contiguous (of (B,H,T) the tokens), other strides are anything. memory (B,H,K,V) is fp32 and contiguous, None for
    an empty one. With a row_map other than ``AS_IS`` q and k are (B,H,T,D): the kernels make the features, and dq and dk are the
    gradients of the rows.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    f: Tensor | None
    z: Tensor | None
    e: Tensor | None
    w: Tensor | None
    memory: Tensor | None
    precision: str = "exact"  # of products: "bf16"; "fp16", or what ``launch.IN_TF32`` says; for fp32 "exact", or "tf32", faster
    row_map: RowMap = AS_IS
    divided: Divided | None = None  # for families that divide
    ends: bool = True  # whether the final memory is written

    @property
    def widths(self) -> tuple[int, int]:
        """K, of the features, and V."""
        return self.row_map.width(self.q.shape[3]), self.v.shape[3]

    @property
    def memory_shape(self) -> tuple[int, int, int, int]:
        """(B,H,K,V)"""
        return (*self.q.shape[:2], *self.widths)


Results = tuple[Tensor, Tensor, tuple[Tensor, ...]]
Gradients = Sequence[Optional[Tensor]]


@dataclass(frozen=True)
class Family:
    """A kernel family.

    computes: the coefficients that the kernels take, in the words of ``recurrence.kinds``.
    needs: those that must be there; any of the others may be absent.
    divides: whether the functions take ``Operands.divided``, for attention normalisation that follows the writes.
    supported: ``supported(operands)``, None, or a sentence that says what about widths, dtypes or the device has no kernel.
    saved_like: ``saved_like(operands)``, shapes and dtypes of the tensors that ``forward`` saves; sizes may be symbolic, so no
        ``int()``.
    forward: ``forward(launcher, operands, keep)``, (y, final memory, saved): saved is a tuple of new tensors as ``saved_like``
        says, () without ``keep``; y is ``torch.empty_like(v)``, contiguous or not, and the final memory is contiguous, without
        ``ends`` of no numbers.
    backward: ``backward(launcher, operands, saved, dy, dmemory)``, (dq, dk, dv, df, dz, de, dw, dmemory), each like its input, None
        where the input is None. The gradient of the final memory that it gets is None where that is 0.
    """

    computes: tuple[str, ...]
    needs: tuple[str, ...]
    supported: Callable[[Operands], str | None]
    saved_like: Callable[[Operands], list[tuple[tuple[int, ...], torch.dtype]]]
    forward: Callable[[Launcher, Operands, bool], Results]
    backward: Callable[[Launcher, Operands, Sequence[Tensor], Tensor, Tensor | None], Gradients]
    divides: bool = False
