"""The fast-weight memory of generation on a GPU: two buffers, of which every token reads one and writes the other, in one kernel.

Every token takes the rows in the order of beam search, which is a buffer, too. So no address ever changes, and a CUDA graph can be
replayed for every second token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..feature_maps import AS_IS, wide
from ..mixers import FastWeight
from ..ops import FastWeightState
from ..ops.dispatch import has_kernels
from ..ops.factored import Factors
from ..ops.kernels import step as kernel
from ..ops.kernels.family import Divided
from ..ops.normalisation import EPS
from .memory import Memory, in_columns


class KernelMemory(Memory):
    """The memory (R,H,K,V) of a layer for R rows, and the sums of keys (R,H,K) that reads are divided by, in fp32."""

    @staticmethod
    def fits(mixer: FastWeight) -> bool:
        """Whether the kernel does the whole step of this mixer: what an erase reads is not divided."""
        if type(mixer.in_proj) is not nn.Linear:
            return False
        weight = mixer.in_proj.weight
        if not (has_kernels(weight) and mixer.backend in ("auto", "cuda") and mixer.has_no_parts and in_columns(mixer)):
            return False
        if mixer.attention_norm and mixer.rule.normaliser == "keys":
            return False
        q, v = (weight.new_empty(1, 1, 1, width) for width in (mixer.sizes["q"] // mixer.num_heads, mixer.head_dim))
        return kernel.why_not(q, v, mixer.rule.sample, mixer.row_map or AS_IS) is None

    @staticmethod
    def takes(mixer: FastWeight, state: FastWeightState | None, rows: int) -> bool:
        """Whether the buffers can hold the state."""
        return True

    def start(self, state: FastWeightState | None, x: Tensor) -> None:
        """Makes the buffers, for the rows of x."""
        keys = (len(x), self.heads, self.mixer.feature_map.out_dim)
        memory = x.new_zeros(*keys, self.value_dim, dtype=torch.float32)
        sums = x.new_zeros(keys, dtype=torch.float32) if self.mixer.attention_norm else None
        if state is not None:
            memory.copy_(state.memory.dense() if isinstance(state.memory, Factors) else state.memory)
            if sums is not None:
                sums.copy_(state.normaliser)
        self.take(memory, sums)

    def take(self, memory: Tensor, sums: Tensor | None = None) -> None:
        """Makes ``memory`` and ``sums`` one of the buffers each."""
        weight, (rows, heads, keys, columns) = self.mixer.in_proj.weight, memory.shape
        self.memory = memory
        self.buffers, self.turn = (memory, torch.empty_like(memory)), 0
        self.sums = None if sums is None else (sums, torch.empty_like(sums))
        self.identity = torch.arange(rows, device=memory.device)
        self.order, self.shares = self.identity.clone(), False
        self.qk = weight.new_empty(2, rows, heads, 1, keys)  # for ``features``
        self.y = weight.new_empty(rows, heads, columns)

    def step(self, x: Tensor) -> Tensor:
        """Writes and reads: x (R,C) -> y (R,C)."""
        mixer, rows = self.mixer, len(x)
        qk, v, *gates = linear(x, mixer.in_proj.weight, mixer.in_proj.bias).split(self.parts, -1)
        v = v.view(rows, self.heads, self.value_dim)
        opened = {name: self.shaped(wide(part).sigmoid()) for name, part in zip(self.rule.gates, gates)}
        coefficients = [None if part is None else part.squeeze(2) for part in self.rule.coefficients(**opened)]
        now, then = self.turn, 1 - self.turn
        divided = None if self.sums is None else Divided(self.eps, max(self.eps, EPS), self.sums[now], self.sums[then])
        operands = (*self.mapped(qk), v, *coefficients, self.buffers[now])
        kernel.step(*operands, mixer.row_map or AS_IS, self.y, self.buffers[then], self.order, divided)
        self.turn = then
        if not self.shares:
            self.order.copy_(self.identity)
        y = self.y if mixer.read_scale == 1 else self.y * mixer.read_scale
        return linear(y.view(rows, -1), mixer.out_proj.weight, mixer.out_proj.bias)

    def mapped(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """Maps the projections of queries and keys to what the kernel reads, (R,H,X) each: features, or rows that it maps."""
        rows = len(qk)
        if self.mixer.row_map is None:
            return tuple(part.view(rows, self.heads, -1) for part in self.features(qk))
        return tuple(part.squeeze(2) for part in self.mixer.feature_map.linear(self.by_head(qk)).unbind())

    def share(self, order: Tensor) -> None:
        """Reads the rows in an order that the memories of all layers share; the step of all layers sets it back."""
        self.order, self.shares = order, True

    def reorder(self, order: Tensor) -> None:
        """Gives row i the memory of row ``order[i]``: the next token's kernel reads it there."""
        if len(order) == len(self.order):
            self.order.copy_(self.order.index_select(0, order))
        else:
            order = self.order.index_select(0, order)
            sums = None if self.sums is None else self.sums[self.turn].index_select(0, order)
            self.take(self.buffers[self.turn].index_select(0, order), sums)

    def state(self) -> FastWeightState:
        """The state after the last token."""
        memory = self.buffers[self.turn].index_select(0, self.order)
        return FastWeightState(memory, None if self.sums is None else self.sums[self.turn].index_select(0, self.order))
