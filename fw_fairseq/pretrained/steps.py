"""Generation token by token: heads whose memory is one buffer, which the loop of ``generation`` changes in place, and whose window
is a ring of the last tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..feature_maps import wide
from ..generation.base import function_of
from ..generation.memory import Memory
from ..ops import FastWeightState
from ..ops.factored import Factors
from .heads import LocalHeads, MemoryHeads, Read
from .window import HeadsState


class HeadsMemory(Memory):
    """The memory of heads whose queries, keys and values come from a pretrained attention."""

    def write(self, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
        """Writes k (B,G,1,D) and v (B,G,1,V) by the gates that the rows (B,X) make, and reads with q: (B,H,1,D) -> (B,H,1,V)."""
        self.prepare(q)
        heads: Any = self.mixer
        k, v = (part.repeat_interleave(heads.num_heads // heads.groups, 1) for part in (k, v))
        rows = rows.unsqueeze(0)
        v = v if heads.value_scale is None else v * heads.value_scale
        (q, _), (k, _) = heads.features(q), heads.features(k)
        k = torch.ones_like(q) if heads.rule.keyless else k
        y = self.recur(q, k, v, heads.all_gates(rows, k, heads.gate_rows(rows)))
        return y if heads.norm is None else heads.norm(y)


class HeadsStep:
    """Heads that read one token of each sequence, from the state of a pass over earlier ones on."""

    def __init__(self, heads: Any, state: Any) -> None:
        self.heads, local = heads, getattr(heads, "local", heads)
        self.memory = HeadsMemory(heads, of_memory(state)) if isinstance(heads, MemoryHeads) else None
        self.in_proj = function_of(heads.in_proj) if self.memory is not None else None
        self.ring = None if local is None else Ring(local, state)

    @staticmethod
    def can_hold(heads: Any, state: Any) -> bool:
        """Whether the heads have a compiled step, and the windows of all sequences have as many tokens."""
        filled = getattr(state, "filled", None)
        even = filled is None or bool((filled.all(0) == filled.any(0)).all())
        return even and (isinstance(heads, LocalHeads) or Memory.can_hold(heads))

    def __call__(self, read: Read) -> Tensor:
        """Maps what the heads read from, of one token, to what they read, (B,H,1,V)."""
        rows = None if self.in_proj is None else self.in_proj(read.x[:, 0])
        if self.ring is None:
            return self.memory.write(read.q, read.k, read.v, rows)  # type: ignore[union-attr, arg-type]
        left = self.ring.put(read.k, read.v, rows)
        y = self.ring.attend(read.q)
        if self.memory is None or left is None:
            return y
        share = wide(rows[:, -self.heads.num_heads :]).sigmoid()[..., None, None].to(y.dtype)  # type: ignore[index]
        return torch.lerp(self.memory.write(read.q, *left).to(y.dtype), y, share)

    def reorder(self, order: Tensor) -> None:
        """Gives row i the state of row ``order[i]``."""
        for part in (self.memory, self.ring):
            if part is not None:
                part.reorder(order)

    def state(self) -> Any:
        """The state after the last token, as a pass over all tokens would leave it."""
        memory = None if self.memory is None else self.memory.state()
        if self.ring is None:
            return memory
        whole = HeadsState() if memory is None else HeadsState(dense(memory.memory), memory.normaliser, memory.log_scale)
        return whole._replace(**self.ring.state())


def dense(memory: Any) -> Tensor:
    """A memory as a matrix for each head."""
    return memory.dense() if isinstance(memory, Factors) else memory


def of_memory(state: Any) -> FastWeightState | None:
    """The part of a state that ``fast_weight`` knows."""
    return state.of_memory() if isinstance(state, HeadsState) else state


class Ring:
    """Keys, values and rows of the last W tokens, (B,W,X); a token takes the place of the one W tokens before it."""

    def __init__(self, local: LocalHeads, state: HeadsState | None) -> None:
        self.local, self.width = local, local.window
        self.held: Tensor | None = None
        self.count, self.next = 0, 0
        if state is not None and state.recent is not None and state.filled is not None:
            self.held, self.count = torch.zeros_like(state.recent), int(state.filled[0].sum())
            self.held[:, : self.count] = state.recent[:, state.filled[0]]
            self.next = self.count % self.width

    def put(self, k: Tensor, v: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor] | None:
        """Adds a token, and returns keys, values and rows of the one that leaves, if any does."""
        parts = [part.flatten(1) for part in (k, v, rows) if part is not None]
        made = torch.cat(parts, -1)
        if self.held is None:
            self.held = made.new_zeros(len(made), self.width, made.shape[-1])
        left = None
        if self.count == self.width:
            sizes = [part.shape[-1] for part in parts]
            old = self.held[:, self.next].clone().split(sizes, -1)
            left = (old[0].view_as(k), old[1].view_as(v), old[-1])
        self.held[:, self.next] = made
        self.count, self.next = min(self.count + 1, self.width), (self.next + 1) % self.width
        return left

    def attend(self, q: Tensor) -> Tensor:
        """Softmax attention of q (B,H,1,D), scaled, to the tokens that are there."""
        assert self.held is not None
        local, parts = self.local, self.held[:, : self.count, : sum(self.local.widths)].split(self.local.widths, -1)
        k, v = (part.unflatten(-1, (local.groups, -1)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q.unflatten(1, (local.groups, -1)).squeeze(3), k, v, scale=1.0)
        return y.flatten(1, 2).unsqueeze(2)

    def reorder(self, order: Tensor) -> None:
        if self.held is not None:
            self.held = self.held.index_select(0, order)

    def state(self) -> dict[str, Tensor | None]:
        """The fields of ``HeadsState`` that are the window's."""
        if self.held is None:
            return {}
        filled = torch.arange(self.width, device=self.held.device) >= self.width - self.count
        return {"recent": self.held.roll(-self.next, 1), "filled": filled.expand(len(self.held), -1)}
