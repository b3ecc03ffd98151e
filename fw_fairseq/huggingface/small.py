"""Memories in int8, while nobody reads on: a quarter of the size, or half of it with what the rounding left."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..feature_maps import wide
from ..ops import FastWeightState

STEPS = 127


class Small(NamedTuple):
    """Takes the place of the memory (B,H,K,V) in a state. ``rest`` is the error of ``whole``, in steps that are 254 times as small.
    Without it each call of ``shrunk`` loses what is smaller than half a step."""

    whole: Tensor  # (B,H,K,V), int8
    scale: Tensor  # (B,H,K,1): a step
    rest: Tensor | None = None  # (B,H,K,V), int8

    def dense(self) -> Tensor:
        """The memory."""
        steps = self.whole if self.rest is None else self.whole + self.rest.to(self.scale.dtype) / (2 * STEPS)
        return steps * self.scale


def shrunk(memory: Tensor, feedback: bool) -> Small:
    """The memory in int8, each key with a step of its own. ``feedback``: the error is kept too, and is fed back when it is read."""
    x = wide(memory)
    scale = x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny) / STEPS
    steps = x / scale
    whole = steps.round()
    rest = ((steps - whole) * (2 * STEPS)).round().to(torch.int8) if feedback else None
    return Small(whole.to(torch.int8), scale, rest)


def shrink(state: Any, feedback: bool) -> Any:
    """A layer's state with its memory in int8, where it has one that is no factors."""
    if isinstance(state, FastWeightState) and isinstance(state.memory, Tensor):
        small: Any = shrunk(state.memory, feedback)
        return state._replace(memory=small)
    return state


def grow(state: Any) -> Any:
    """The state as layers take it."""
    return state._replace(memory=state.memory.dense()) if isinstance(getattr(state, "memory", None), Small) else state
