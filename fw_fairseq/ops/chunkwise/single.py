"""The way to run a chunk that none of the ``frames`` holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ...rules import Coefficients
from ..recurrent import step_form
from .frames import ChunkInputs, Outcome


class SingleTokens:
    """One token at a time, with gradients by autograd."""

    dtype: torch.dtype | None = None
    side_by_side = False

    @staticmethod
    def run(given: ChunkInputs, memory: Tensor) -> tuple[Tensor, Tensor]:
        tokens: list[Any] = [None if x is None else x.unsqueeze(1) for x in given]
        q, k, v, *coefficients = tokens
        y, memory = step_form(q, k, v.to(memory.dtype), Coefficients(*coefficients), memory.unsqueeze(1))
        return y.squeeze(1), memory.squeeze(1)

    @classmethod
    def forward(cls, given: ChunkInputs, memory: Tensor) -> Outcome:
        return *cls.run(given, memory), None, memory

    @classmethod
    def backward(
        cls, given: ChunkInputs, memory: Tensor, _: object, dy: Tensor, dfinal: Tensor
    ) -> tuple[Sequence[Tensor | None], Tensor]:
        with torch.enable_grad():
            leaves: list[Any] = [None if x is None else x.detach().requires_grad_() for x in (*given, memory)]
            results = cls.run(ChunkInputs(*leaves[:-1]), leaves[-1])
        present = [x for x in leaves if x is not None]
        grads = iter(torch.autograd.grad(results, present, (dy.to(memory.dtype), dfinal.to(memory.dtype))))
        *found, dmemory = (None if x is None else next(grads) for x in leaves)
        return found, cast("Tensor", dmemory)
