"""The fast-weight memory of generation on a GPU: two buffers, of which every token reads one and writes the other, in one kernel.

Every token takes the rows in the order of beam search, which is a buffer, too. So no address ever changes, and a CUDA graph can be
replayed for every second token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..feature_maps import AS_IS
from ..mixers import FastWeight
from ..ops import FastWeightState
from ..ops.factored import Factors
from ..ops.kernels import step as kernel
from ..ops.kernels.family import Divided
from ..ops.kernels.launch import has_kernels
from ..ops.normalisation import EPS
from .base import InPlaceStepper, function_of
from .memory import in_columns, mapped, take_apart


class KernelMemory(InPlaceStepper):
    """The memory (R,H,K,V) of a layer for R rows, and the sums of keys (R,H,K) that reads are divided by, in fp32."""

    mixer: FastWeight

    @staticmethod
    def can_hold(mixer: FastWeight) -> bool:
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

    def start(self, state: Any, x: Tensor) -> None:
        mixer, self.rule = self.mixer, self.mixer.rule
        self.in_proj, self.out_proj = function_of(mixer.in_proj), function_of(mixer.out_proj)
        keys = (len(x), mixer.num_heads, mixer.feature_map.out_dim)
        memory = x.new_zeros(*keys, mixer.head_dim, dtype=torch.float32)
        sums = x.new_zeros(keys, dtype=torch.float32) if mixer.attention_norm else None
        if state is not None:
            memory.copy_(state.memory.dense() if isinstance(state.memory, Factors) else state.memory)
            if sums is not None:
                sums.copy_(state.normaliser)
        self.hold(memory, sums)

    def hold(self, memory: Tensor, sums: Tensor | None) -> None:
        """Makes ``memory`` and ``sums`` one of the buffers each."""
        self.buffers, self.turn = (memory, torch.empty_like(memory)), 0
        self.sums = None if sums is None else (sums, torch.empty_like(sums))
        self.identity = torch.arange(len(memory), device=memory.device)
        self.order, self.shares = self.identity.clone(), False
        self.y = self.mixer.in_proj.weight.new_empty(*memory.shape[:2], memory.shape[3])

    def step(self, x: Tensor) -> Tensor:
        mixer = self.mixer
        qk, v, coefficients = take_apart(mixer, self.rule, self.in_proj(x))
        q, k, v = (part.squeeze(2) for part in (*mapped(mixer, qk, mixer.row_map is not None), v))
        f, z, e, w = (None if part is None else part.squeeze(2) for part in coefficients)
        now, then = self.turn, 1 - self.turn
        eps = mixer.feature_map.eps
        divided = None if self.sums is None else Divided(eps, max(eps, EPS), self.sums[now], self.sums[then])
        row_map = mixer.row_map or AS_IS
        kernel.step(q, k, v, f, z, e, w, self.buffers[now], row_map, self.y, self.buffers[then], self.order, divided)
        self.turn = then
        if not self.shares:
            self.order.copy_(self.identity)
        y = self.y if mixer.read_scale == 1 else self.y * mixer.read_scale
        return self.out_proj(y.view(len(x), -1))

    def share(self, order: Tensor) -> None:
        """Reads the rows in an order that the memories of all layers share; the step of all layers sets it back."""
        self.order, self.shares = order, True

    def reorder_buffers(self, order: Tensor) -> None:
        """The next token's kernel reads the rows in this order."""
        if len(order) == len(self.order):
            self.order.copy_(self.order.index_select(0, order))
        else:
            order = self.order.index_select(0, order)
            sums = None if self.sums is None else self.sums[self.turn].index_select(0, order)
            self.hold(self.buffers[self.turn].index_select(0, order), sums)

    def buffered_state(self) -> FastWeightState:
        memory = self.buffers[self.turn].index_select(0, self.order)
        return FastWeightState(memory, None if self.sums is None else self.sums[self.turn].index_select(0, self.order))
