"""All that a fast-weight layer makes of its input: queries, keys, values and gates, from one projection."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import Mistake
from ...feature_maps import check_not_offloaded, wide
from ...ops import FastWeightState
from ...ops.checks import check_tokens
from ...ops.dispatch import has_kernels
from ...rules import RULES, Gate, Rule, gates
from ...rules.gates import Place
from ..base import VALUES, Mixer, is_linear, rows, split_heads
from ..features import (
    build_feature_map,
    check_combination,
    initial_bias,
    makes_gates_of_keys,
    normalised_features,
    row_map_of,
    with_room,
)
from .convolution import ShortConvolution, make_shift
from .gates import GateMaker
from .rotation import positions, rotated

MIXING = Gate("V", gates.values_7)
ROW_UNIT = 8  # columns: 16 bytes of the smallest type


class Operands(NamedTuple):
    """A layer gives these to the operation, or keeps them for its output and its state."""

    q: Tensor  # (B,H,T,K)
    k: Tensor  # (B,H,n T,K)
    v: Tensor  # (B,H,n T,V)
    gates: dict[str, Tensor]
    key_log_scale: Tensor | None
    output: Tensor | None  # (T,B,C): the gate of the output before its SiLU
    mixing: Tensor | None  # (T,B,X): what the share of the first layer's values is made of
    kept: dict[str, Tensor]  # what the state keeps beside the memory, by its fields


class Projected(Mixer):
    """The first part of a fast-weight layer; ``operands`` maps tokens to what the operation takes.

    ``sizes`` has the rows of ``in_proj`` by what they make, in order. Without further options q, k, v and each gate have theirs,
    and a gate is their sigmoid.
    """

    def __init__(self, embed_dim: int, heads: int, config, layer: int, layers: int):
        super().__init__(embed_dim, heads)
        self.rule_name, self.feature_norm = str(config.update_rule), str(config.feature_norm)
        self.attention_norm, self.key_heads = config.attention_norm, config.key_heads or heads
        self.feature_map = build_feature_map(config, self.head_dim, self.key_heads)
        check_combination(config, self.feature_map, heads)
        self.rotary = config.rotary
        layer_maps = self.rule.keyless or self.rotary or makes_gates_of_keys(self.rule)  # which need the features
        self.row_map = None if layer_maps else row_map_of(self.feature_map, self.feature_norm)
        self.writes = config.product_steps if self.rule.several else 1
        self.sign = 2.0 if config.negative_eigenvalues else 1.0  # what gates that erase are multiplied by
        self.write_strength_init = config.write_strength_init
        key_size, self.makers = self.key_heads * self.feature_map.head_dim, nn.ModuleDict()
        self.sizes = {"q": key_size, "k": 0 if self.rule.keyless else self.writes * key_size, "v": self.writes * embed_dim}
        for name, gate in self.rule.gates.items():
            count = heads * gate.width(self.feature_map.out_dim, self.head_dim)
            if not gate.projected:
                self.makers[name] = GateMaker(gate, Place(count, heads, layer, layers), self.head_dim)
            self.sizes[name] = self.makers[name].size if name in self.makers else self.writes * count
        if config.output_gate:
            self.sizes["output"] = embed_dim
        self.takes_shared = config.value_mixing_rank > 0
        self.mixing = self.make_mixing(config.value_mixing_rank, layer, layers) if self.takes_shared else None
        self.in_proj = nn.Linear(embed_dim, sum(self.sizes.values()), bias=not config.bias_free)
        self.shift = make_shift(config, self.sizes, embed_dim, layer, layers)
        self.conv = ShortConvolution(sum([*self.sizes.values()][:3]), config.short_conv) if config.short_conv else None

    def make_mixing(self, rank: int, layer: int, layers: int) -> GateMaker | None:
        """Returns what makes the shares of the first layer's values, with rows of the projection; None in that layer."""
        if layers == 1:
            raise Mistake(f"--value-mixing-rank is {rank}; it has no effect in a model of one layer")
        if layer == 0:
            return None
        maker = GateMaker(replace(MIXING, rank=rank), Place(self.sizes["v"], self.num_heads, layer, layers), self.head_dim)
        self.sizes["mixing"] = maker.size
        return maker

    @property
    def plain(self) -> bool:
        """Whether queries, keys, values and gates are rows of ``in_proj`` and nothing is around the recurrence."""
        parts = (self.shift, self.conv, self.makers or None, self.sizes.get("output"))
        own = any(part is not None for part in parts) or self.rotary or self.takes_shared
        one = self.writes == 1 and self.sign == 1 and self.key_heads == self.num_heads
        return self.rule.simple and not self.rule.keyless and one and not own

    @property
    def rule(self) -> Rule:
        """The update rule. It is looked up each time, since its functions do not pickle."""
        return RULES[self.rule_name]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws weights as fairseq's attention does; gates start at the biases that their rule asks for, and a gate with ``still``
        is there whatever the token."""
        sizes, gates = list(self.sizes.values()), self.rule.gates
        biases = [None] * len(sizes) if self.in_proj.bias is None else self.in_proj.bias.split(sizes)
        for name, weight, bias in zip(self.sizes, self.in_proj.weight.split(sizes), biases):
            nn.init.xavier_uniform_(weight, gain=1 / math.sqrt(2))
            if name == "mixing" or (name in gates and gates[name].still):
                weight.zero_()
            if bias is not None:
                plain, place = name in gates and name not in self.makers, Place(len(bias), self.num_heads)
                bias.copy_(initial_bias(gates[name], place, self.write_strength_init) if plain else bias.new_zeros(()))

    def operands(self, x: Tensor, state: FastWeightState | None = None, padding_mask=None, reset_mask=None) -> Operands:
        """Maps x (T,B,C) to what ``fast_weight`` takes."""
        check_tokens("x", x, len(x))
        kept, masks = {}, (padding_mask, reset_mask)
        q_size, k_size, v_size, *others = self.sizes.values()
        projected = self.project(x)
        if self.shift is not None:
            if not isinstance(self.in_proj, nn.Linear):
                raise Mistake("in_proj was replaced, and token shift reads its weight; merge an adapter into it first")
            check_not_offloaded(self.in_proj.weight, x, "in_proj is", "token shift reads its weight", "the layers")
            previous = None if state is None else state.previous
            added, kept["previous"] = self.shift(x, self.in_proj.weight, previous, *masks)
            projected = projected[..., : added.shape[-1]] + added
        rest = projected.shape[-1] - sum(self.sizes.values())
        qkv, *others = projected.split([q_size + k_size + v_size, *others, rest], dim=-1)
        if self.conv is not None:
            qkv, kept["recent"] = self.conv(qkv, None if state is None else state.recent, *masks)
        qk, v = qkv.split([q_size + k_size, v_size], dim=-1)
        q, k, key_log_scale = self.queries_and_keys(qk)
        gates = self.all_gates(x, k, others)
        if self.rotary:
            place, kept["position"] = positions(None if state is None else state.position, x, *masks)
            q, k = rotated(q, place), rotated(k, place.repeat_interleave(self.writes, dim=1))
        named = dict(zip([*self.sizes][3:], others))
        v = self.by_head(self.in_turn(v))
        return Operands(q, k, v, gates, key_log_scale, named.get("output"), named.get("mixing"), kept)

    def with_first_values(self, v: Tensor, mixing: Tensor | None, shared: dict[str, Tensor] | None) -> Tensor:
        """Leaves the values (B,H,n T,V) of layer 0 in ``shared``, and mixes those into the values of a later layer, each channel by
        a share of its own."""
        if self.mixing is None:
            if shared is not None:
                shared[VALUES] = v
            return v
        if not shared or VALUES not in shared:
            raise Mistake("a layer with --value-mixing-rank needs shared, in which layer 0 leaves its values")
        share = self.mixing(mixing).unflatten(-1, (self.writes, -1)).flatten(2, 3)
        return torch.lerp(v, shared[VALUES].to(v.dtype), share.to(v.dtype))

    def queries_and_keys(self, qk: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Maps their rows to features (B,H,T,K) and (B,H,n T,K), and the log scale of keys."""
        key_log_scale = None
        if self.sizes["q"] == self.sizes["k"]:
            (q, k), log_scale = self.features(qk.unflatten(-1, (2, self.key_heads, -1)).permute(2, 1, 3, 0, 4))  # (2,B,H,T,X)
            key_log_scale = None if log_scale is None else log_scale[1]
        else:
            q, k = qk.split([self.sizes["q"], self.sizes["k"]], dim=-1)
            q = self.features(split_heads(q, self.key_heads))[0]
            k = torch.ones_like(q) if self.rule.keyless else self.features(split_heads(self.in_turn(k), self.key_heads))[0]
        if self.key_heads != self.num_heads:
            q, k = (x.repeat_interleave(self.num_heads // self.key_heads, dim=1) for x in (q, k))
            if key_log_scale is not None:
                key_log_scale = key_log_scale.repeat_interleave(self.num_heads // self.key_heads, dim=1)
        return q, k, key_log_scale

    def in_turn(self, x: Tensor) -> Tensor:
        """(T,B,n X) -> (n T,B,X), for the n writes of each token."""
        return x if self.writes == 1 else x.unflatten(-1, (self.writes, -1)).transpose(1, 2).flatten(0, 1)

    def all_gates(self, x: Tensor, k: Tensor, parts: list[Tensor]) -> dict[str, Tensor]:
        """The gates by name, from x (T,B,C), the keys (B,H,T,K) and the rows of the projection that each gate has."""
        made: dict[str, Tensor] = {}
        for (name, gate), part in zip(self.rule.gates.items(), parts):
            if name not in self.makers:
                made[name] = self.gate(name, self.in_turn(part))
            else:
                made[name] = self.makers[name](k if gate.of == "k" else made[gate.of] if gate.of else x if gate.constant else part)
            if gate.erases and self.sign != 1:
                made[name] = self.sign * made[name]
        return made

    def project(self, x: Tensor) -> Tensor:
        """The rows of ``in_proj`` for x. Kernels read many tokens 16 bytes at a time; for them columns of 0 fill the rows up to a
        multiple of 8 columns."""
        missing = -self.in_proj.out_features % ROW_UNIT
        if missing == 0 or len(x) == 1 or not has_kernels(x):
            return self.in_proj(x)
        if not is_linear(self.in_proj):
            return F.pad(self.in_proj(x), (0, missing))
        bias = None if self.in_proj.bias is None else F.pad(self.in_proj.bias, (0, missing))
        return F.linear(x, F.pad(self.in_proj.weight, (0, 0, 0, missing)), bias)

    def gate(self, name: str, part: Tensor) -> Tensor:
        """The gate (B,H,T) or (B,H,T,X), X its axis."""
        part = part.permute(1, 2, 0) if self.rule.gates[name].axis is None else self.by_head(part)
        return torch.sigmoid(wide(part))

    def features(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The features of x after --feature-norm, and the log of the factor that was divided out where it does not cancel.
        Where the operation makes the features (``row_map``), only the part of the map that has parameters is applied."""
        if self.row_map is not None:
            return self.feature_map.linear(x), None
        keep_scale = self.attention_norm and self.rule.normaliser == "write"
        x = with_room(self.feature_map, x) if self.attention_norm else x
        return normalised_features(self.feature_map, self.feature_norm, x, keep_scale)

    def projections(self) -> dict[str, dict[str, slice]]:
        return {"in_proj": rows(**{f"gate {name}" if name in self.rule.gates else name: n for name, n in self.sizes.items()})}
