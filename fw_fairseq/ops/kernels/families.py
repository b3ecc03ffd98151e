"""The kernel families, which run the recurrence over all tokens, and which of them computes which coefficients.

A family is one Python module, beside its sources in ``cuda/``, with the members of ``Family``, and one entry in ``FAMILIES``.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...errors import Mistake
from ...feature_maps import RowMap
from ...rules import Coefficients
from . import channel_delta, decay, delta, linear


class Family(Protocol):
    """The contract of a kernel family.

    The inputs: q, k (B,H,T,K) and v, y, dy (B,H,T,V) have one dtype, fp32, bf16 or fp16; f, z, e, w are fp32, None where absent.
    The last dimension of all of them is contiguous (of (B,H,T) the tokens), other strides are anything. memory and dmemory
    (B,H,K,V) are fp32 and contiguous. With a row_map other than ``AS_IS`` q and k are (B,H,T,D): the kernels make the features, and
    dq and dk are the gradients of the rows.

    The outputs: y and dv are ``torch.empty_like(v)``, contiguous or not, and the other gradients likewise; the final memory is
    contiguous. ``launcher`` is described in ``launch``.

    precision: "bf16" for 16-bit inputs; for fp32 "exact" (as accurate as fp32) or "tf32" (faster, operands rounded to 11 bits).
    """

    COMPUTES: tuple[str, ...]  # the coefficients that the kernels take, in the words of ``kinds``
    NEEDS: tuple[str, ...]  # those that must be there; any of the others may be absent
    DIVIDES: bool  # whether all four functions take ``divided``, for attention normalisation that follows the writes

    def supported(self, q: Tensor, k: Tensor, v: Tensor, f, z, e, w, row_map: RowMap) -> str | None:
        """None, or a sentence that says what about widths, dtypes or the device has no kernel."""

    def saved_like(self, q, k, v, f, z, e, w, memory, precision: str, row_map: RowMap) -> list[tuple[tuple, torch.dtype]]:
        """The shapes and dtypes of the tensors that ``forward`` saves; sizes may be symbolic, so no ``int()``."""

    def forward(self, launcher, q, k, v, f, z, e, w, memory, precision: str, keep: bool, row_map: RowMap):
        """(y, final memory, saved): saved is a tuple of new tensors as ``saved_like`` says, () without ``keep``."""

    def backward(self, launcher, q, k, v, f, z, e, w, memory, saved, dy, dmemory, precision: str, row_map: RowMap):
        """(dq, dk, dv, df, dz, de, dw, dmemory), None where the input is None."""


FAMILIES: dict[str, Family] = {"linear": linear, "decay": decay, "delta": delta, "channel_delta": channel_delta}
AXES = {3: "per token", 4: "per channel"}


def kinds(coefficients: Coefficients) -> tuple[str, ...]:
    """The coefficients that are present and what they vary over, such as "f per channel" and "w per token"."""
    present = [(name, x.dim()) for name, x in zip(Coefficients._fields, coefficients) if x is not None]
    return tuple(f"{name} {AXES.get(dim, f'of {dim} dimensions')}" for name, dim in present)


def find_family(coefficients: Coefficients) -> Family | None:
    """The first family that computes exactly these coefficients; None where no family does."""
    present = kinds(coefficients)
    for family in FAMILIES.values():
        if all(kind in family.COMPUTES for kind in present) and all(kind in present for kind in family.NEEDS):
            return family
    return None


def why_no_family(coefficients: Coefficients) -> str | None:
    """A sentence that says that no family computes these coefficients; None where one does."""
    if find_family(coefficients) is not None:
        return None
    able = "; ".join(f"{name}: {', '.join(family.COMPUTES)}" for name, family in FAMILIES.items())
    return f"backend='cuda' has no kernel for {', '.join(kinds(coefficients))} together; its families compute {able}"


def family_of(*coefficients: Tensor | None) -> Family:
    """The family that computes f, z, e, w; ValueError where none does."""
    given = Coefficients(*coefficients)
    family = find_family(given)
    if family is None:
        raise Mistake(why_no_family(given))
    return family
