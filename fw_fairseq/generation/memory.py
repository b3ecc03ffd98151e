"""The fast-weight memory of generation: one buffer for all rows and heads, which every token changes in place.

Beam search gives the order of the hypotheses, in which the next token's pass over the memory reads the rows. While there are few
tokens, the compiled loop keeps the memory as their factors: the hypotheses share those, so that a new order moves one number for
each token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..feature_maps import FeatureMap
from ..mixers import FastWeight
from ..mixers.parts.features import normalised_features
from ..ops import FastWeightState
from ..ops.factored import Factors
from ..ops.inputs import READ_AND_ERASE
from ..ops.kernels.launch import has_kernels
from ..ops.native import takes
from ..rules import Coefficients
from .base import InPlaceStepper, function_of
from .memory_loop import MemoryLoop


def in_columns(mixer: FastWeight) -> bool:
    """Whether memory and sums of keys can be one matrix, (R,H,K,V) or (R,H,K,V+1): the rule has coefficients, and keys have no
    scale of their own."""
    scaled = type(mixer.feature_map).scaled is not FeatureMap.scaled and mixer.attention_norm and mixer.feature_norm == "none"
    return not scaled and mixer.rule.coefficients is not None


def take_apart(mixer: FastWeight, rule: Any, parts: Tensor) -> tuple[Tensor, Tensor, Coefficients]:
    """What the input projection of a plain layer makes of a token, (R,P), as rows of queries and keys, (2,R,H,1,X), values
    (R,H,1,V) and coefficients, (R,H,1) or (R,H,1,X)."""
    rows, heads = len(parts), mixer.num_heads
    q_size, k_size, *others = mixer.sizes.values()
    qk, v, *gates = parts.split([q_size + k_size, *others], -1)
    opened = {}
    for name, part in zip(rule.gates, gates):
        gate = (part if part.dtype == torch.float64 else part.float()).sigmoid()
        opened[name] = gate.unsqueeze(-1) if gate.shape[-1] == heads else gate.view(rows, heads, 1, -1)
    return qk.view(rows, 2, heads, 1, -1).transpose(0, 1), v.view(rows, heads, 1, -1), rule.coefficients(**opened)


def mapped(mixer: FastWeight, qk: Tensor, maps_rows: bool) -> Tensor:
    """Maps rows of queries and keys to their features, or with ``maps_rows`` to what a loop or a kernel makes features of."""
    if maps_rows:
        return mixer.feature_map.linear(qk)
    return normalised_features(mixer.feature_map, mixer.feature_norm, qk, False)[0].to(qk.dtype)


class FactorBuffers:
    """The factors of a few tokens, with room for as many as take less space than the memory."""

    def __init__(self, rows: int, heads: int, keys: int, columns: int, shared: bool, like: Tensor) -> None:
        self.shared, self.count = shared, 0
        room = -(-keys * columns // (keys + columns)) - 1
        self.keys, self.values = (like.new_empty(rows, heads, room, width) for width in (keys, columns))
        self.places = torch.arange(rows, device=like.device)[:, None].repeat(1, room)

    def room(self) -> int:
        return self.keys.shape[2]

    def reorder(self, order: Tensor) -> None:
        """Gives hypothesis i the tokens of ``order[i]``. Those that decay are copied: each hypothesis has its own decay."""
        self.places = self.places.index_select(0, order)
        if self.shared and len(order) <= len(self.keys):
            return
        keys, values = self.gathered()
        self.keys, self.values = (part.new_empty(len(order), *part.shape[1:]) for part in (self.keys, self.values))
        self.keys[:, :, : self.count], self.values[:, :, : self.count] = keys, values
        self.places = torch.arange(len(order), device=order.device)[:, None].repeat(1, self.room())

    def gathered(self) -> Factors:
        """The factors of each hypothesis, (R,H,S,K) and (R,H,S,V)."""
        rows, tokens = self.places[:, : self.count], torch.arange(self.count, device=self.places.device)
        return Factors(*(part[rows, :, tokens].transpose(1, 2) for part in (self.keys, self.values)))


class Memory(InPlaceStepper):
    """The memory (R,H,K,V) of a layer for R rows; with attention normalisation the sums of keys are one more column, (R,H,K,V+1).

    ``write_and_read`` does the recurrence: the compiled loop, or PyTorch, which takes plain layers only. ``kept``: what the parts
    around the recurrence keep.
    """

    mixer: FastWeight
    write_and_read: Any

    def __init__(self, mixer: FastWeight, state: FastWeightState | None) -> None:
        super().__init__(mixer, state)
        self.rule: Any = mixer.rule
        self.reads_projection = mixer.has_no_parts
        self.columns = mixer.head_dim + mixer.attention_norm
        self.in_proj, self.out_proj = function_of(mixer.in_proj), function_of(mixer.out_proj)

    @staticmethod
    def can_hold(mixer: FastWeight) -> bool:
        """Whether neither the mixer's options nor its kernels ask for another form of the step, and there is one for its
        recurrence here."""
        rule, weight = mixer.rule, next(mixer.in_proj.parameters(), None)  # a quantised layer has none
        if weight is None or weight.dtype not in (torch.float32, torch.float64) or has_kernels(weight):
            return False
        if mixer.backend not in ("auto", "recurrent") or not in_columns(mixer):
            return False
        knows = not (rule.removal is not None and rule.erases) and (rule.simple or not mixer.attention_norm)
        return mixer.has_no_parts or (knows and takes(weight.detach()))

    def start(self, state: Any, x: Tensor) -> None:
        mixer, rule, in_loop = self.mixer, self.rule, takes(x)
        made = rule.key is not None or rule.query is not None
        row_map = None if made else mixer.row_map  # a rule makes another key or query of the features
        self.write_and_read = MemoryLoop(mixer, row_map, x) if in_loop else step_in_pytorch
        self.maps_rows = in_loop and self.write_and_read.maps_rows
        before = {} if state is None else state._asdict()
        beside = before.keys() - {"memory", "normaliser"}
        self.kept: dict[str, Tensor] = {name: before[name] for name in beside if before[name] is not None}
        self.factors: FactorBuffers | None = None
        sizes = len(x), mixer.num_heads, mixer.feature_map.out_dim, self.columns
        axes = {gate.axis for gate in rule.gates.values()}
        whole_sums = mixer.attention_norm and rule.normaliser == "keys" and "K" in axes
        if state is None and in_loop and rule.one_step and not whole_sums:
            decays = rule.sample.f is not None or rule.sample.z is not None
            self.factors = FactorBuffers(*sizes, not decays, x)
            if self.factors.room():
                return
        memory, self.factors = x.new_zeros(sizes), None
        if state is not None:
            memory[..., : mixer.head_dim] = state.memory.dense() if isinstance(state.memory, Factors) else state.memory
            if mixer.attention_norm:
                memory[..., -1] = state.normaliser
        self.hold(memory)

    def hold(self, memory: Tensor) -> None:
        """Makes ``memory`` the buffer. One that was made in inference mode could not be changed outside of it."""
        with torch.inference_mode(False):
            self.memory = memory.clone() if memory.is_inference() else memory
        self.spare: Tensor | None = None
        self.order: Tensor | None = None

    def grow(self, factors: FactorBuffers) -> None:
        """The factors have one more token; they become the matrix that they stand for once they are full."""
        factors.count += 1
        if factors.count == factors.room():
            self.hold(factors.gathered().dense())
            self.factors = None

    def turn(self) -> tuple[Tensor, Tensor | None]:
        """Returns the buffer that has the memory, and the order in which the rows of ``self.memory`` are to be read from there."""
        source, order = self.memory, self.order
        if order is not None:
            spare = self.spare
            if spare is None or len(spare) != len(order):
                with torch.inference_mode(False):
                    spare = torch.empty(len(order), *source.shape[1:], dtype=source.dtype, device=source.device)
            self.memory, self.spare, self.order = spare, source, None
        return source, order

    def in_order(self) -> Tensor:
        """The memory, once the rows have their order."""
        source, order = self.turn()
        return self.memory if order is None else torch.index_select(source, 0, order, out=self.memory)

    def reorder_buffers(self, order: Tensor) -> None:
        self.kept = {name: part.index_select(0, order) for name, part in self.kept.items()}
        if self.factors is not None:
            self.factors.reorder(order)
        else:
            self.order = order.contiguous() if self.order is None else self.order.index_select(0, order)

    def buffered_state(self) -> FastWeightState:
        width, norm = self.mixer.head_dim, self.mixer.attention_norm
        if self.factors is None:
            memory = self.in_order()
            return FastWeightState(memory[..., :width].clone(), memory[..., -1].clone() if norm else None, **self.kept)
        keys, values = self.factors.gathered()
        sums = (keys.mT @ values[..., -1:]).squeeze(-1) if norm else None
        return FastWeightState(Factors(keys, values[..., :width]), sums, **self.kept)

    def __call__(self, x: Tensor, source: Tensor | None = None) -> Tensor:
        x = x if source is None else source
        return self.of_projected(self.in_proj(x)) if self.reads_projection else super().__call__(x)

    def of_projected(self, parts: Tensor) -> Tensor:
        """Writes and reads what the input projection of a plain layer makes of a token: (R,P) -> y (R,C)."""
        self.prepare(parts)
        mixer = self.mixer
        qk, v, coefficients = take_apart(mixer, self.rule, parts)
        y = self.write_and_read(self, *mapped(mixer, qk, self.maps_rows), v, *coefficients)
        y = y if mixer.read_scale == 1 else y * mixer.read_scale
        return self.out_proj(y.view(len(parts), -1))

    def step(self, x: Tensor) -> Tensor:
        """Writes and reads for any layer, which makes queries, keys, values and gates as it always does."""
        mixer = self.mixer
        made = mixer.operands(x.unsqueeze(0), FastWeightState(x, **self.kept))  # whose memory it does not read
        q, k, v, gates, *_ = made
        self.kept = made.kept
        if mixer.takes_shared:
            v = mixer.with_first_values(v, made.mixing, self.shared)
        return mixer.output(self.recur(q, k, v, gates), made, v).squeeze(0)

    def recur(self, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> Tensor:
        """Writes and reads what a layer has made of a token, (R,H,n,X): -> (R,H,1,V)."""
        mixer, rule = self.mixer, self.rule
        if mixer.row_map is not None and not self.maps_rows:
            q, k = mixer.row_map(q), mixer.row_map(k)
        q = q if rule.query is None else rule.query(q, k, **gates)
        k = k if rule.key is None else rule.key(k, **gates)
        f, z, e, w = rule.coefficients(**gates)
        written = v
        if w is not None and w.dim() == 4:  # a strength per channel
            written, w = v * w, None
        u = None if rule.bonus is None else rule.bonus(**gates)
        a, p = (None, None) if rule.removal is None else rule.removal(**gates)
        parts = q, k, written, f, z, e, w, u, a, p
        for i in range(mixer.writes):
            of_write = (part if part is None or part.shape[2] == 1 else part[:, :, i : i + 1] for part in parts)
            y = self.write_and_read(self, *of_write)
        return y if rule.skip is None else y + rule.skip(**gates).unsqueeze(-1) * v


def step_in_pytorch(memory: Memory, q: Tensor, k: Tensor, v: Tensor, *coefficients: Tensor | None) -> Tensor:
    """As ``MemoryLoop``, with features q and k (R,H,1,K). coefficients: (R,H,1) or (R,H,1,X); plain layers have the first four."""
    held, mixer, sums = memory.in_order(), memory.mixer, memory.rule.normaliser
    width, eps = mixer.head_dim, mixer.feature_map.eps
    f, z, e, w = (x if x is None or x.dim() == 4 else x.unsqueeze(-1) for x in coefficients[:4])
    values = held[..., :width]
    if f is not None:  # the sums of keys shrink, too, where they follow the writes
        (held if sums == "write" else values).mul_(f.mT)
    if z is not None:
        values.mul_(z)
    update = v if w is None else v * w
    if e is not None:
        recalled = k @ held
        if mixer.attention_norm and sums == "keys" and mixer.attention_norm_of == READ_AND_ERASE:
            e = e / (recalled[..., width:] + eps)
        update = update - e * recalled[..., :width]
    if mixer.attention_norm:
        of_key = torch.ones_like(v[..., :1]) if w is None or sums == "keys" else w
        update = torch.cat([update, of_key], -1)
    held.addcmul_(k.mT, update)  # a batched product is slower for one token
    y = q @ held
    return y[..., :width] / (y[..., width:] + eps) if mixer.attention_norm else y
