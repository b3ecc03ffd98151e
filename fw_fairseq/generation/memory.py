"""The fast-weight memory of generation: one buffer for all rows and heads, which every token changes in place.

A token takes one projection, the feature map, and at most three small products for all heads at once. The sums of keys that
attention normalisation divides by are one more column of the memory, (R H, K, V + 1).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..feature_maps import SMALLEST_SUM, FeatureMap
from ..mixers import FastWeight
from ..mixers.features import normalised_features
from ..ops import FastWeightState
from ..ops.dispatch import has_kernels
from ..ops.factored import Factors
from ..ops.inputs import READ_AND_ERASE

SMALL = 2**19  # numbers in the memories of all rows and heads, which fit into a cache


def projected(mixer: FastWeight, x: Tensor) -> Tensor:
    """Returns the input projection of x (R,C), or of what sparse projections read."""
    dense = type(mixer.in_proj) is nn.Linear
    return F.linear(x, mixer.in_proj.weight, mixer.in_proj.bias) if dense else mixer.in_proj(x)


def put_out(mixer: FastWeight, y: Tensor) -> Tensor:
    """Maps what was read, (R,C), to the output of the layer; sparse projections have none."""
    dense = type(mixer.out_proj) is nn.Linear
    return F.linear(y, mixer.out_proj.weight, mixer.out_proj.bias) if dense else mixer.out_proj(y)


def in_columns(mixer: FastWeight) -> bool:
    """Whether memory and sums of keys can be one matrix, (R,H,K,V) or (R,H,K,V+1): the rule has coefficients, and keys have no
    scale of their own."""
    scaled = type(mixer.feature_map).scaled is not FeatureMap.scaled and mixer.attention_norm and mixer.feature_norm == "none"
    return not scaled and mixer.rule.coefficients is not None


def steps_here(mixer: FastWeight) -> bool:
    """Whether neither the mixer's options nor its kernels ask for another form of the step."""
    weight = next(mixer.in_proj.parameters(), None)  # a quantised layer has none
    wide = weight is not None and weight.dtype in (torch.float32, torch.float64)
    return wide and mixer.backend in ("auto", "recurrent") and not has_kernels(weight)


class Memory:
    """The memory (R,H,K,V), or (R,H,K,V+1), of a layer for R rows."""

    def __init__(self, mixer: FastWeight, state: FastWeightState | None, x: Tensor):
        self.mixer, self.rule = mixer, mixer.rule
        self.heads, self.value_dim = mixer.num_heads, mixer.head_dim
        q_size, k_size, *others = mixer.sizes.values()
        self.parts = [q_size + k_size, *others]
        self.gates = self.parts[2:]
        self.eps = mixer.feature_map.eps
        self.divides_erase = mixer.rule.normaliser == "keys" and mixer.attention_norm_of == READ_AND_ERASE
        self.columns = self.value_dim + mixer.attention_norm
        self.start(state, x)

    def start(self, state: FastWeightState | None, x: Tensor) -> None:
        """Makes the buffer, for the rows of x."""
        self.take(x.new_zeros(len(x), self.heads, self.mixer.feature_map.out_dim, self.columns))
        if state is not None:
            self.memory[..., : self.value_dim] = state.memory.dense() if isinstance(state.memory, Factors) else state.memory
            if self.mixer.attention_norm:
                self.memory[..., -1] = state.normaliser

    @staticmethod
    def fits(mixer: FastWeight) -> bool:
        """Whether the memory of this mixer can be changed in place here, and no kernel does the step."""
        return mixer.has_no_parts and in_columns(mixer) and steps_here(mixer)

    @staticmethod
    def takes(mixer: FastWeight, state: FastWeightState | None, rows: int) -> bool:
        """Whether the memory is a matrix by now, or so small that it may be one from the start."""
        if state is not None and not isinstance(state.memory, Factors):
            return True
        return rows * mixer.num_heads * mixer.feature_map.out_dim * mixer.head_dim <= SMALL

    def take(self, memory: Tensor) -> None:
        """Makes ``memory`` the buffer, and sets up what depends on its number of rows. Buffers that are made in inference mode
        could not be changed outside of it."""
        rows, heads, width, columns = memory.shape
        with torch.inference_mode(False):
            memory = memory.clone() if memory.is_inference() else memory
            self.memory, self.flat = memory, memory.view(rows * heads, width, columns)
            self.spare: Tensor | None = None
            self.qk = memory.new_empty(2, rows, heads, 1, width)  # for ``features``
            self.values = memory.new_ones(rows, heads, columns) if self.mixer.attention_norm else None

    def state(self) -> FastWeightState:
        """The state after the last token."""
        memory = self.memory[..., : self.value_dim].clone()
        return FastWeightState(memory, self.memory[..., -1].clone() if self.mixer.attention_norm else None)

    def reorder(self, order: Tensor) -> None:
        """Copies the rows ``order`` into a second buffer, in one pass."""
        if len(order) != len(self.memory):
            return self.take(self.memory.index_select(0, order))
        with torch.inference_mode(False):
            spare = torch.empty_like(self.memory) if self.spare is None else self.spare
            flat = spare.view(self.flat.shape)
        torch.index_select(self.memory, 0, order, out=spare)
        self.spare, self.memory, self.flat = self.memory, spare, flat
        return None

    def step(self, x: Tensor) -> Tensor:
        """Writes and reads: x (R,C) -> y (R,C)."""
        return self.of_projected(projected(self.mixer, x))

    def of_projected(self, parts: Tensor) -> Tensor:
        """Writes and reads what the input projection makes of a token: (R,P) -> y (R,C)."""
        mixer, rows, columns = self.mixer, len(parts), self.memory.shape[-1]
        qk, v, *gates = parts.split(self.parts, -1)
        q, k = self.features(qk)
        c = self.rule.coefficients(**{name: self.shaped(part.sigmoid()) for name, part in zip(self.rule.gates, gates)})
        self.decay(c.f, c.z)
        v = v.view(rows, self.heads, self.value_dim)
        if c.e is None:
            update = v if c.w is None else v * c.w
        else:
            recalled = torch.bmm(k.unsqueeze(1), self.flat).view(rows, self.heads, columns)
            update = self.without(recalled, v, c.e, c.w)
        if self.values is not None:
            self.values[..., :-1] = update
            if c.w is not None and self.rule.normaliser == "write":
                self.values[..., -1:] = c.w
            update = self.values
        self.memory.addcmul_(k.view(rows, self.heads, -1, 1), update.unsqueeze(2))  # a batched product is slower for one token
        y = torch.bmm(q.unsqueeze(1), self.flat)
        if self.values is not None:
            y = y[..., :-1] / (y[..., -1:] + self.eps)
        if mixer.read_scale != 1:
            y = y * mixer.read_scale
        return put_out(mixer, y.view(rows, -1))

    def features(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Maps the projections of queries and keys, (R, 2 H X), to their features, (R H, K) each."""
        mixer, x = self.mixer, self.by_head(x)
        if mixer.feature_norm == "sum":  # straight into the buffer; without gradients, a sum of 0 needs no case of its own
            features = mixer.feature_map.scaled(x)[0]
            torch.div(features, features.sum(-1, keepdim=True).clamp_(min=SMALLEST_SUM), out=self.qk)
        else:
            self.qk.copy_(normalised_features(mixer.feature_map, mixer.feature_norm, x, False)[0])
        return self.qk.view(2, -1, self.qk.shape[-1]).unbind()

    def by_head(self, x: Tensor) -> Tensor:
        """Maps (R, 2 H X) to (2,R,H,1,X)."""
        return x.view(len(x), 2, self.heads, 1, -1).transpose(0, 1)

    def shaped(self, gate: Tensor) -> Tensor:
        """Maps (R, H X) to (R,H,1), or (R,H,1,X) where the gate has a number per channel."""
        return gate.unsqueeze(-1) if gate.shape[-1] == self.heads else gate.view(len(gate), self.heads, 1, -1)

    def decay(self, f: Tensor | None, z: Tensor | None) -> None:
        """Shrinks the memory. The sums of keys shrink with it where they follow the writes."""
        memory = self.memory if self.rule.normaliser == "write" else self.memory[..., : self.value_dim]
        if f is not None:
            memory.mul_(f.unsqueeze(-1) if f.dim() == 3 else f.mT)
        if z is not None:
            self.memory[..., : self.value_dim].mul_(z if z.dim() == 4 else z.unsqueeze(-1))

    def without(self, recalled: Tensor, v: Tensor, e: Tensor, w: Tensor | None) -> Tensor:
        """Returns w v - e times what the key recalls, (R,H,V)."""
        same = e is w
        if self.values is not None:
            if self.divides_erase:
                e, same = e / (recalled[..., -1:] + self.eps), False
            recalled = recalled[..., :-1]
        if same:
            return (v - recalled).mul_(e)
        return torch.addcmul(v if w is None else v * w, recalled, e, value=-1)
