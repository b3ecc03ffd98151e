"""Fast weights as a layer: projections, feature map, gates, memory, output projection.

``parts`` has what published layers have beside the recurrence: gates with parameters of their own, a short convolution, rotary
positions, a norm of the output. ``features`` has the features, and refuses options that do not go together.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import Mistake
from ..feature_maps import FeatureMap, check_not_offloaded
from ..ops import FastWeightState, fast_weight
from ..ops.checks import check_tokens
from ..ops.kernels.launch import has_kernels
from ..rules import RULES, Gate, exponential
from ..rules.gates import Place, values_7
from .base import VALUES, Mixer, is_linear, rows
from .parts.convolution import ShortConvolution, make_shift
from .parts.features import (
    build_feature_map,
    check_combination,
    initial_bias,
    low_rank,
    makes_gates_of_keys,
    normalised_features,
    row_map_of,
    with_room,
)
from .parts.gates import GateMaker
from .parts.output import OutputGate, explained, make_norm
from .parts.rotation import positions, rotated
from .parts.watched import Watched

MIXING = Gate("V", values_7)
OWN_7 = -0.04  # where the weights of --read-own-value start in RWKV 7
ROW_UNIT = 8  # columns: 16 bytes of the smallest type


class Projected(NamedTuple):
    """What a layer makes of its input: it gives these to the operation, or keeps them for its output and its state."""

    q: Tensor  # (B,H,T,K)
    k: Tensor  # (B,H,n T,K)
    v: Tensor  # (B,H,n T,V)
    gates: dict[str, Tensor]
    key_log_scale: Tensor | None
    output: Tensor | None  # (T,B,X): what the gate of the output is made of
    mixing: Tensor | None  # (T,B,X): what the share of the first layer's values is made of
    kept: dict[str, Tensor]  # what the state keeps beside the memory, by its fields


class FastWeight(Watched, Mixer):
    """Fast weights with any update rule and feature map. One projection makes q, k, v and every gate of the rule.

    ``sizes`` has the rows of ``in_proj`` by what they make, in order. Without further options q, k, v and each gate have theirs,
    and a gate is their sigmoid.
    """

    state_type, takes_source, takes_keep_state = FastWeightState, True, True
    settings = (
        "update_rule", "feature_map", "feature_dim", "feature_norm", "attention_norm", "attention_norm_of", "dpfp_nu",
        "favor_features", "favor_prescale", "write_strength_init", "product_steps", "negative_eigenvalues", "key_heads",
        "short_conv", "short_conv_bias", "token_shift", "token_shift_rank", "rotary", "value_mixing_rank", "expand_values",
        "output_norm", "output_norm_of", "output_norm_eps", "norm_after_gate", "output_gate", "output_gate_form",
        "output_gate_rank", "gate_rank", "exponential_decay", "read_own_value", "scale_reads", "scale_reads_of", "scale_after_norm",
        "projection_init", "allow_divergence", "bias_free", "fast_weight_backend",
    )  # fmt: skip

    def __init__(
        self, embed_dim: int, heads: int = 1, config: Any = None, *, layer: int = 0, layers: int = 1, **given: object
    ) -> None:
        super().__init__(embed_dim, heads, divided=not (given.get("feature_dim") or getattr(config, "feature_dim", 0)))
        config = self.read_settings(config, given)
        self.rule_name, self.feature_norm = str(config.update_rule), str(config.feature_norm)
        self.rule = rule = RULES[self.rule_name]
        self.backend, self.attention_norm_of = str(config.fast_weight_backend), str(config.attention_norm_of)
        self.attention_norm, self.key_heads = config.attention_norm, config.key_heads or heads
        self.feature_map = phi = build_feature_map(config, self.head_dim, self.key_heads)
        self.value_width = round(embed_dim * config.expand_values)
        if self.value_width % heads or not self.value_width:
            raise Mistake(f"--expand-values makes values {self.value_width} wide; that must be a multiple of the heads, {heads}")
        self.head_dim = self.value_width // heads
        check_combination(config, phi, heads)
        self.rotary = config.rotary
        layer_maps = rule.keyless or self.rotary or makes_gates_of_keys(rule)  # which need the features
        self.has_linear = type(phi).linear is not FeatureMap.linear
        self.row_map = None if layer_maps else row_map_of(phi, self.feature_norm)
        self.writes = config.product_steps if rule.several else 1
        self.sign = 2.0 if config.negative_eigenvalues else 1.0  # what gates that erase are multiplied by
        self.write_strength_init = config.write_strength_init
        self.makers, self.sizes = nn.ModuleDict(), self.rows_of_attention()
        decays_otherwise = config.exponential_decay
        self.gates = {name: exponential(gate) if decays_otherwise and gate.decays else gate for name, gate in rule.gates.items()}
        if config.gate_rank:
            self.gates = {
                name: replace(gate, rank=config.gate_rank) if low_rank(gate) else gate for name, gate in self.gates.items()
            }
        for name, gate in self.gates.items():
            count = heads * {None: 1, "K": phi.out_dim, "V": self.head_dim}[gate.axis]
            if not gate.projected:
                self.makers[name] = maker = GateMaker(gate, Place(count, heads, layer, layers), self.head_dim)
            self.sizes[name] = self.writes * count if gate.projected else maker.size
        self.gate = None
        if config.output_gate:
            self.gate = OutputGate(str(config.output_gate_form), config.output_gate_rank, self.value_width)
            self.sizes["output"] = self.gate.size
        self.takes_shared = config.value_mixing_rank > 0
        self.mixing = None  # what makes the shares of the first layer's values, with rows of the projection
        if self.takes_shared and layer > 0:
            place = Place(self.sizes["v"], heads, layer, layers)
            self.mixing = GateMaker(replace(MIXING, rank=config.value_mixing_rank), place, self.head_dim)
            self.sizes["mixing"] = self.mixing.size
        self.in_proj = self.make_in_proj(bias=not config.bias_free)
        self.shift = make_shift(config, self.sizes, embed_dim, layer, layers)
        convolved, taps = sum([*self.sizes.values()][:3]), config.short_conv
        self.conv = ShortConvolution(convolved, taps, config.short_conv_bias) if taps else None
        self.out_proj = nn.Linear(self.value_width, embed_dim, bias=not config.bias_free)
        self.make_output(config)
        strength = [] if rule.coefficients is None else ["write_strength"]
        names = [*(f"gate_{name}" for name in rule.gates), *strength, "state_norm"]
        self.last_statistics: dict[str, Tensor | None] = dict.fromkeys(names)
        self.reset_parameters()
        if str(config.projection_init) == "rwkv7":
            self.start_as_rwkv7((layer + 1) / layers)

    def make_output(self, config: Any) -> None:
        """What happens to the reads of the heads, but for the gate."""
        scale = (self.head_dim if str(config.scale_reads_of) == "values" else self.feature_map.head_dim) ** -0.5
        scale = scale if config.scale_reads else 1.0
        scaled_before: bool = config.output_norm and not config.scale_after_norm
        self.read_scale: float = 1.0 if scaled_before else scale
        given = str(config.output_norm_of), self.num_heads, self.head_dim, scale if scaled_before else 1.0, config.output_norm_eps
        self.norm, self.norm_after_gate = make_norm(*given) if config.output_norm else None, config.norm_after_gate
        self.own: Any = None  # the weights of the features of what a token reads of its own value
        if config.read_own_value:
            self.own = nn.Parameter(torch.full((self.num_heads * self.feature_map.out_dim,), OWN_7))

    def rows_of_attention(self) -> dict[str, int]:
        """The rows of ``in_proj`` that make queries, keys and values."""
        keys = self.key_heads * self.feature_map.head_dim
        return {"q": keys, "k": 0 if self.rule.keyless else self.writes * keys, "v": self.writes * self.value_width}

    def make_in_proj(self, bias: bool) -> nn.Linear:
        """``in_proj``, with the rows of ``sizes``."""
        return nn.Linear(self.embed_dim, sum(self.sizes.values()), bias=bias)

    @staticmethod
    def of_before(options: dict) -> dict[str, bool]:
        """Returns what stored options that are older than --scale-after-norm lack, to compute what they did."""
        scaled = options.get("scale_reads") and options.get("output_norm") and "scale_after_norm" not in options
        return {"scale_after_norm": True} if scaled else {}

    @classmethod
    def of_layer(cls, embed_dim: int, num_heads: int, config: Any, layer: int, layers: int) -> FastWeight:
        return cls(embed_dim, num_heads, config, layer=layer, layers=layers)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "rule"}  # its functions do not pickle

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.rule = RULES[self.rule_name]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws weights as fairseq's attention does; gates start at the biases that their rule asks for, and a gate with ``still``
        is there whatever the token."""
        sizes, gates = list(self.sizes.values()), self.gates
        biases = [None] * len(sizes) if self.in_proj.bias is None else self.in_proj.bias.split(sizes)
        for name, weight, bias in zip(self.sizes, self.in_proj.weight.split(sizes), biases):
            nn.init.xavier_uniform_(weight, gain=1 / math.sqrt(2))
            still = self.gate is not None and self.gate.up is not None and self.gate.form == "of_sigmoid"
            if name == "mixing" or (name in gates and gates[name].still) or (name == "output" and still):
                weight.zero_()
            if bias is not None:
                starts, place = name in gates and name not in self.makers, Place(len(bias), self.num_heads)
                bias.copy_(initial_bias(gates[name], place, self.write_strength_init) if starts else bias.new_zeros(()))
        nn.init.xavier_uniform_(self.out_proj.weight)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)

    @torch.no_grad()
    def start_as_rwkv7(self, depth: float) -> None:
        """The start of --projection-init rwkv7, in a layer at this depth, up to 1 for the last."""
        weights = dict(zip(self.sizes, self.in_proj.weight.split([*self.sizes.values()])))
        for name, gain in (("q", 1.0), ("k", 0.1), ("v", 1.0)):
            if len(weights[name]):
                nn.init.orthogonal_(weights[name], gain)
        self.out_proj.weight.zero_()
        if self.norm is not None:
            self.norm.weight.fill_(depth**0.7)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        state: FastWeightState | None = None,
        padding_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
        *,
        decoding: bool = False,
        group: Any = None,
        source: Tensor | None = None,
        shared: dict[str, Tensor] | None = None,
        keep_state: bool = True,
    ) -> tuple[Tensor, FastWeightState]:
        read = x if source is None else source
        made = self.operands(read, state, padding_mask, reset_mask)
        q, k, v, gates, key_log_scale, _, mixing, kept = made
        if self.takes_shared:
            v = self.with_first_values(v, mixing, shared)
        y, state = fast_weight(
            q, k, v.to(q.dtype), self.rule_name, gates, state, self.backend, self.attention_norm, self.feature_map.eps,
            padding_mask=padding_mask, key_log_scale=key_log_scale, reset_mask=reset_mask, feature_map=self.row_map,
            decoding=decoding, group=group, attention_norm_of=self.attention_norm_of, keep_state=keep_state or self.notes(),
        )  # fmt: skip
        self.note_statistics(gates, state, padding_mask)
        return self.output(y.to(v.dtype), made, v), state._replace(**kept) if kept and state is not None else state

    def operands(
        self,
        x: Tensor,
        state: FastWeightState | None = None,
        padding_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
    ) -> Projected:
        """Maps x (T,B,C) to what ``fast_weight`` takes."""
        check_tokens("x", x, x.shape[0])
        kept: dict[str, Tensor] = {}
        masks = padding_mask, reset_mask
        sizes = [*self.sizes.values()]
        projected = self.project(x)
        if self.shift is not None:
            if not isinstance(self.in_proj, nn.Linear):
                raise Mistake("in_proj was replaced, and token shift reads its weight; merge an adapter into it first")
            check_not_offloaded(self.in_proj.weight, x, "in_proj is", "token shift reads its weight", "the layers")
            previous = None if state is None else state.previous
            added, kept["previous"] = self.shift(x, self.in_proj.weight, previous, *masks)
            projected = projected[..., : added.shape[-1]] + added
        filled = projected.shape[-1] - sum(sizes)
        others = [*sizes[3:], filled] if filled else sizes[3:]
        if self.conv is None:
            q, k, v, *parts = projected.split([*sizes[:3], *others], dim=-1)
        else:
            qkv, *parts = projected.split([sum(sizes[:3]), *others], dim=-1)
            qkv, kept["recent"] = self.conv(qkv, None if state is None else state.recent, *masks)
            q, k, v = qkv.split(sizes[:3], dim=-1)
        q, k, key_log_scale = self.queries_and_keys(q, k)
        gates = self.all_gates(x, k, parts)
        if self.rotary:
            place, kept["position"] = positions(None if state is None else state.position, x, *masks)
            q, k = rotated(q, place), rotated(k, place.repeat_interleave(self.writes, dim=1))
        named = dict(zip([*self.sizes][3:], parts))
        v = self.by_write(v, self.num_heads)
        return Projected(q, k, v, gates, key_log_scale, named.get("output"), named.get("mixing"), kept)

    def project(self, x: Tensor) -> Tensor:
        """The rows of ``in_proj`` for x. Kernels read many tokens 16 bytes at a time; for them columns of 0 fill the rows up to a
        multiple of 8 columns."""
        missing = -self.in_proj.out_features % ROW_UNIT
        if missing == 0 or x.shape[0] == 1 or not has_kernels(x):
            return self.in_proj(x)
        if not is_linear(self.in_proj):
            return F.pad(self.in_proj(x), (0, missing))
        bias = None if self.in_proj.bias is None else F.pad(self.in_proj.bias, (0, missing))
        return F.linear(x, F.pad(self.in_proj.weight, (0, 0, 0, missing)), bias)

    def by_write(self, x: Tensor, heads: int) -> Tensor:
        """(T,B,n H X) -> (B,H,n T,X), for the n writes of each token."""
        return x.unflatten(-1, (self.writes, heads, -1)).permute(1, 3, 0, 2, 4).flatten(2, 3)

    def queries_and_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Maps their rows to features (B,H,T,K) and (B,H,n T,K), and the log scale of keys."""
        q, key_log_scale = self.features(q.unflatten(-1, (self.key_heads, -1)).permute(1, 2, 0, 3))[0], None
        if self.rule.keyless:
            k = torch.ones_like(q)
        else:
            k, key_log_scale = self.features(self.by_write(k, self.key_heads))
        if self.key_heads != self.num_heads:
            q, k = (x.repeat_interleave(self.num_heads // self.key_heads, dim=1) for x in (q, k))
            if key_log_scale is not None:
                key_log_scale = key_log_scale.repeat_interleave(self.num_heads // self.key_heads, dim=1)
        return q, k, key_log_scale

    def features(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The features of x after --feature-norm, and the log of the factor that was divided out where it does not cancel.
        Where the operation makes the features (``row_map``), only the part of the map that has parameters is applied."""
        if self.row_map is not None:
            return (self.feature_map.linear(x) if self.has_linear else x), None
        keep_scale = self.attention_norm and self.rule.normaliser == "write"
        x = with_room(self.feature_map, x) if self.attention_norm else x
        return normalised_features(self.feature_map, self.feature_norm, x, keep_scale)

    def all_gates(self, x: Tensor, k: Tensor, parts: list[Tensor]) -> dict[str, Tensor]:
        """The gates by name, (B,H,n T) or (B,H,n T,X), from x (T,B,C), the keys (B,H,T,K) and the rows of the projection that each
        gate has."""
        made: dict[str, Tensor] = {}
        for (name, gate), part in zip(self.gates.items(), parts):
            if name in self.makers:
                made[name] = self.makers[name](k if gate.of == "k" else made[gate.of] if gate.of else x if gate.constant else part)
            else:
                part = self.by_write(part if part.dtype == torch.float64 else part.float(), self.num_heads)
                made[name] = torch.sigmoid(part.squeeze(-1) if gate.axis is None else part)
            if gate.once and self.writes > 1:
                made[name] = F.pad(made[name].unsqueeze(3), (0, self.writes - 1), value=1.0).flatten(2, 3)
            if gate.erases and self.sign != 1:
                made[name] = self.sign * made[name]
        return made

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

    def output(self, y: Tensor, made: Projected, v: Tensor) -> Tensor:
        """Maps what the heads read, (B,H,T,V), to the layer's output (T,B,C). v: the values that were written."""
        gate = None if self.gate is None else self.gate(made.output)
        if self.norm is not None:
            if gate is not None and self.norm_after_gate:
                y, gate = y * self.by_head(gate), None
            y = self.norm(y)
        if self.own is not None:
            y = y + self.read_of_own(made, v).to(y.dtype)
        y = self.join(y)
        y = y if self.read_scale == 1 else y * self.read_scale
        return self.out_proj(y if gate is None else y * gate)

    def read_of_own(self, made: Projected, v: Tensor) -> Tensor:
        """What --read-own-value adds to the reads: the values (B,H,n T,V) of each token times the weighted products of q and k."""
        q, k = (made.q, made.k) if self.row_map is None else (self.row_map(made.q), self.row_map(made.k))
        k = k if self.rule.key is None else self.rule.key(k, **made.gates)
        q = q.repeat_interleave(self.writes, 2)
        own = (q * k * self.own.view(self.num_heads, 1, -1)).sum(-1, keepdim=True) * v
        return own.unflatten(2, (-1, self.writes)).sum(3)

    def projections(self) -> dict[str, dict[str, slice]]:
        return {"in_proj": rows(**{f"gate {name}" if name in self.rule.gates else name: n for name, n in self.sizes.items()})}

    def pretrained(self) -> dict[str, slice]:
        start = self.sizes["q"] + self.sizes["k"]
        values, whole = slice(start, start + self.sizes["v"]), slice(None)
        return {"in_proj.weight": values, "in_proj.bias": values, "out_proj.weight": whole, "out_proj.bias": whole}

    @property
    def has_no_parts(self) -> bool:
        """Whether queries, keys, values and gates are rows of ``in_proj`` and nothing is around the recurrence."""
        parts = (self.shift, self.conv, self.makers or None, self.gate, self.norm, self.own)
        own = any(part is not None for part in parts) or self.rotary or self.takes_shared
        one = self.writes == 1 and self.sign == 1 and self.key_heads == self.num_heads
        return self.rule.simple and not self.rule.keyless and one and not own

    def state_size(self) -> int:
        keys, before = self.num_heads * self.feature_map.out_dim, self.in_proj.in_features if self.shift is not None else 0
        recent = 0 if self.conv is None else (len(self.conv.weight) - 1) * self.conv.weight.shape[1]
        scaled = self.row_map is None and self.feature_norm == "none" and type(self.feature_map).scaled is not FeatureMap.scaled
        scales = self.num_heads if scaled and self.attention_norm and self.rule.normaliser == "write" else 0
        return keys * (self.head_dim + self.attention_norm) + scales + recent + before

    def explain(self, x: Tensor) -> dict[str, Tensor]:
        """The last token's read is linear in the values, so that values with one channel per write read their weights."""
        if self.rule.coefficients is None:
            raise Mistake(f"--update-rule {self.rule_name} has no weights of past tokens: its memory is not linear in the values")
        q, k, _, gates, key_log_scale, *_ = self.operands(x)
        of_values = {name: gate for name, gate in gates.items() if self.rule.gates[name].axis == "V"}
        each = torch.eye(k.shape[2], dtype=k.dtype, device=x.device).expand(*k.shape[:2], -1, -1)
        given = gates | {name: gate.new_ones(*gate.shape[:3], k.shape[2]) for name, gate in of_values.items()}
        y, _ = fast_weight(
            q, k, each, self.rule_name, given, None, self.backend, self.attention_norm, self.feature_map.eps,
            key_log_scale=key_log_scale, feature_map=self.row_map, attention_norm_of=self.attention_norm_of,
        )  # fmt: skip
        return explained(y[0, :, -1], self.rule.coefficients(**gates), self.writes)

    def why_not_across_workers(self) -> str | None:
        if self.rule.coefficients is None:
            return f"--update-rule {self.rule_name} has steps of its own, which workers cannot take apart"
        parts = {"--short-conv": self.conv is not None, "--token-shift": self.shift is not None, "--rotary": self.rotary}
        named = next((name for name, present in parts.items() if present), None)
        return None if named is None else f"{named} needs the tokens of the worker before it; leave it out"

    def redraw(self, keep: bool = False) -> None:
        self.feature_map.redraw(keep)
