"""One mixer that reads one token of each row at a time, and softmax attention likewise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import Mistake
from .kv_cache import Past, attend


def check_rows(rows: int, held: int) -> None:
    """Refuses tokens of other rows than the states have: loops trust in their number."""
    if rows != held:
        raise Mistake(f"tokens have {rows} rows and the states of this generation {held}; give as many or reorder the states")


def function_of(module: Any) -> Callable[[Tensor], Tensor]:
    """The module's function without what modules do around it, which takes as long as the function for a few rows."""
    if type(module) is nn.Linear:
        return lambda x: F.linear(x, module.weight, module.bias)
    if type(module) is nn.LayerNorm:
        return lambda x: torch.layer_norm(x, module.normalized_shape, module.weight, module.bias, module.eps)
    if type(module) is nn.RMSNorm:
        return lambda x: torch.rms_norm(x, module.normalized_shape, module.weight, module.eps)
    return (lambda x: x) if type(module) is nn.Identity else module


class Stepper:
    """Calls the mixer, which returns a new state for each token.

    ``reads_projection``: whether ``of_projected`` maps what the input projection makes of a token, (R,P), to y (R,C). ``shared``:
    what the layers of a pass share, the same dictionary for all of them; each token replaces what the one before it left there.
    """

    reads_projection = False

    mixer: Any

    def __init__(self, mixer: nn.Module, state: Any) -> None:
        self.mixer, self.last = mixer, state
        self.shared: dict[str, Tensor] | None = None

    def __call__(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        """Maps x (R,C) to y (R,C). ``source``: what the input projection reads in place of x."""
        given: dict[str, Any] = {} if source is None else {"source": source.unsqueeze(0)}
        given |= {"shared": self.shared} if self.mixer.takes_shared else {}
        y, self.last = self.mixer(x.unsqueeze(0), self.last, decoding=True, **given)
        return y.squeeze(0)

    def reorder(self, order: Tensor) -> None:
        """Gives row i the state of row ``order[i]``."""
        if self.last is not None:
            self.last = self.last.index_select(order)

    def state(self) -> Any:
        """The state after the last token."""
        return self.last


class InPlaceStepper(Stepper):
    """Keeps the state in buffers, which the first token makes and every token changes.

    A subclass has ``can_hold``, whether it has buffers and a step for a mixer; ``start``, which makes the buffers for tokens like
    x; ``step``; and for started buffers ``reorder_buffers`` and ``buffered_state``.
    """

    can_hold: Callable[[Any], bool]
    start: Callable[[Any, Tensor], None]
    step: Callable[[Tensor], Tensor]
    reorder_buffers: Callable[[Tensor], None]
    buffered_state: Callable[[], Any]

    def __init__(self, mixer: nn.Module, state: Any) -> None:
        super().__init__(mixer, state)
        self.rows: int | None = None if state is None else state[0].shape[0]  # that the states have
        self.started = False

    def __call__(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        self.prepare(x)
        return self.step(x if source is None else source)

    def prepare(self, x: Tensor) -> None:
        """Refuses tokens of other rows than the states have, and makes the buffers before the first token."""
        if not self.started:
            self.rows = len(x) if self.rows is None else self.rows
            check_rows(len(x), self.rows)
            self.start(self.last, x)
            self.last, self.started = None, True
        elif len(x) != self.rows:
            check_rows(len(x), self.rows or 0)

    def reorder(self, order: Tensor) -> None:
        self.rows = None if self.rows is None else len(order)
        self.reorder_buffers(order) if self.started else super().reorder(order)

    def state(self) -> Any:
        return self.buffered_state() if self.started else super().state()


class SoftmaxStepper(Stepper):
    """Softmax attention, ``q_proj`` to ``out_proj``, whose keys and values stay where they are: a token adds its own."""

    def __call__(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        attention = self.mixer
        return attention.out_proj(self.read(attention.q_proj(x), attention.k_proj(x), attention.v_proj(x)))

    def read(self, *parts: Tensor) -> Tensor:
        """Adds k and v to the past, and reads it with q: (R,C) each -> y (R,C)."""
        q, k, v = (part.reshape(len(part), self.mixer.num_heads, 1, -1) for part in parts)
        self.last = (Past.empty(k, 64) if self.last is None else self.last).add(k, v, None)
        keys, values, hidden = self.last.tokens()
        return attend(q, keys, values, hidden, False).view(len(q), -1)
