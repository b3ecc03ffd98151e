"""One layer that reads one token of each row at a time: what adds to the residual stream, and the norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import function_of


def swiglu(x: Tensor) -> Tensor:
    """The activation of --ffn-form swiglu: silu(gate) * up, of both side by side."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


class AttentionStep:
    """What a mixer, or other attention, adds to the residual stream, by its stepper. norm: the one before it, if any; owner: whose
    state it has."""

    def __init__(self, owner: Any, stepper: Any, norm: nn.Module | None) -> None:
        self.owner, self.stepper = owner, stepper
        self.norm = None if norm is None else function_of(norm)

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x (R,C) to what the attention adds to it."""
        return self.stepper(x if self.norm is None else self.norm(x))

    def reorder(self, order: Tensor) -> None:
        self.stepper.reorder(order)

    def states(self) -> list[tuple[nn.Module, object]]:
        return [(self.owner, self.stepper.state())]


class FeedForwardStep:
    """What a feed-forward network adds to the residual stream. norm: the one before it, if any."""

    def __init__(self, fc1: nn.Module, activation: Callable[[Tensor], Tensor], fc2: nn.Module, norm: nn.Module | None) -> None:
        self.norm, self.fc1, self.fc2 = None if norm is None else function_of(norm), function_of(fc1), function_of(fc2)
        own = type(fc1) is nn.Linear and activation is F.relu  # a result of its own, which may be changed
        self.activation = torch.relu_ if own else function_of(activation)

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x (R,C) to what the network adds to it."""
        return self.fc2(self.activation(self.fc1(x if self.norm is None else self.norm(x))))

    def reorder(self, order: Tensor) -> None:
        """There is no state."""

    def states(self) -> list[tuple[nn.Module, object]]:
        return []


class LayerStep:
    """One layer. parts: what adds to the residual stream, the attention first; norms: those after each of them, None where norms
    come before."""

    def __init__(self, parts: list, norms: list[nn.Module] | None) -> None:
        self.parts, self.norms = parts, None if norms is None else list(map(function_of, norms))

    @property
    def stepper(self) -> Any:
        return self.parts[0].stepper

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x (R,C) to the layer's output (R,C)."""
        if self.norms is not None:
            for part, norm in zip(self.parts, self.norms):
                x = norm(part(x).add_(x))
            return x
        first, *others = self.parts
        x = x + first(x)
        for part in others:
            x.add_(part(x))
        return x
