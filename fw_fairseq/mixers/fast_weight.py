"""Fast weights as a layer: projections, feature map, gates, memory, output projection."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..feature_maps import FEATURE_MAPS, FeatureMap, l2_normalise, sum_normalise, wide
from ..ops import FastWeightState, RowMap, fast_weight
from ..ops.checks import missing_form
from ..ops.recall import until_end
from ..rules import RULES, Rule
from .base import Mixer


class FastWeight(Mixer):
    """One projection makes q, k, v and every gate of the rule; ``config`` is a FastWeightConfig."""

    state_type = FastWeightState

    def __init__(self, embed_dim: int, num_heads: int, config):
        super().__init__(embed_dim, num_heads)
        self.rule_name, self.feature_norm = str(config.update_rule), str(config.feature_norm)
        self.attention_norm, self.backend = config.attention_norm, str(config.fast_weight_backend)
        self.feature_map = build_feature_map(config, self.head_dim, num_heads)
        check_combination(config, self.feature_map)
        self.row_map = row_map_of(self.feature_map, self.feature_norm)
        key_dim, widths = self.feature_map.head_dim, {None: 1, "K": self.feature_map.out_dim, "V": self.head_dim}
        self.sizes = {"q": num_heads * key_dim, "k": num_heads * key_dim, "v": embed_dim}
        self.sizes |= {name: num_heads * widths[gate.axis] for name, gate in self.rule.gates.items()}
        self.in_proj = nn.Linear(embed_dim, sum(self.sizes.values()))
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        strength = [] if self.rule.coefficients is None else ["write_strength"]
        self.last_statistics = dict.fromkeys([*(f"gate_{name}" for name in self.rule.gates), *strength, "state_norm"])
        self.reset_parameters()

    @property
    def rule(self) -> Rule:
        """Not kept: it has functions, which do not pickle."""
        return RULES[self.rule_name]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """As fairseq's attention; gates start at the biases that their rule asks for."""
        nn.init.zeros_(self.in_proj.bias)
        parts = zip(
            self.sizes, self.in_proj.weight.split(list(self.sizes.values())), self.in_proj.bias.split(list(self.sizes.values()))
        )
        for name, weight, bias in parts:
            nn.init.xavier_uniform_(weight, gain=1 / math.sqrt(2))
            gate = self.rule.gates.get(name)
            if gate is not None:
                bias.copy_(initial_bias(gate.bias, len(bias)))
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor], Tensor | None]:
        """q, k, v (B,H,T,...), gates and the log scale of keys, as ``fast_weight`` takes them."""
        qk_size, _, *sizes = self.sizes.values()
        qk, v, *gates = self.in_proj(x).split([2 * qk_size, *sizes], dim=-1)
        (q, k), log_scale = self.features(qk.unflatten(-1, (2, self.num_heads, -1)).permute(2, 1, 3, 0, 4))  # (2,B,H,T,X)
        key_log_scale = None if log_scale is None else log_scale[1]
        v = self.by_head(v)
        return q, k, v, {name: self.gate(name, part) for name, part in zip(self.rule.gates, gates)}, key_log_scale

    def forward(self, x: Tensor, state: FastWeightState | None = None, padding_mask=None, reset_mask=None):
        q, k, v, gates, key_log_scale = self.operands(x)
        y, state = fast_weight(
            q, k, v.to(q.dtype), self.rule_name, gates, state, self.backend, self.attention_norm, self.eps,
            padding_mask=padding_mask, key_log_scale=key_log_scale, reset_mask=reset_mask, feature_map=self.row_map,
            decoding=self.decoding, group=self.group,
        )  # fmt: skip
        if self.training and self.watched:
            self.last_statistics = self.measure(gates, state)
            self.state_norm = state.memory.flatten(2).norm(dim=-1).mean() if self.keeps_state_norm else None
        return self.out_proj(self.join(y.to(v.dtype))), state

    @property
    def eps(self) -> float | None:
        """The map's, where common scales of keys cancel in what is read; an erase divides by the operation's own."""
        return self.feature_map.eps if self.rule.normaliser == "write" else None

    def pretrained(self) -> dict[str, slice]:
        start = self.sizes["q"] + self.sizes["k"]
        values, whole = slice(start, start + self.sizes["v"]), slice(None)
        return {"in_proj.weight": values, "in_proj.bias": values, "out_proj.weight": whole, "out_proj.bias": whole}

    def explain(self, x: Tensor) -> dict[str, Tensor]:
        """What the last token reads is linear in the values: the weight of each comes from values of one channel per token."""
        if self.rule.coefficients is None:
            raise ValueError(
                f"--update-rule {self.rule_name} has no weights of past tokens: its memory is not linear in the values"
            )
        q, k, _, gates, key_log_scale = self.operands(x)
        decay = {name: gate for name, gate in gates.items() if self.rule.gates[name].axis == "V"}
        ones = torch.eye(len(x), dtype=k.dtype, device=x.device).expand(*k.shape[:2], -1, -1)
        plain = gates | {name: gate.new_ones(*gate.shape[:3], len(x)) for name, gate in decay.items()}
        y, _ = fast_weight(
            q, k, ones, self.rule_name, plain, None, self.backend, self.attention_norm, self.eps,
            key_log_scale=key_log_scale, feature_map=self.row_map,
        )  # fmt: skip
        coefficients = self.rule.coefficients(**gates)
        read, write = y[0, :, -1], coefficients.w
        if coefficients.z is not None:
            read = read * until_end(coefficients.z)[0].exp().mean(-1)
        return {"read": read, "write": torch.ones_like(read) if write is None else write[0]}

    def why_not_across_workers(self) -> str | None:
        if self.rule.coefficients is None:
            return f"--update-rule {self.rule_name} has steps of its own, which workers cannot take apart"
        return None

    def redraw(self, keep: bool = False) -> None:
        self.feature_map.redraw(keep)

    def gate(self, name: str, part: Tensor) -> Tensor:
        """(B,H,T), or with the gate's axis."""
        part = part.permute(1, 2, 0) if self.rule.gates[name].axis is None else self.by_head(part)
        return torch.sigmoid(wide(part))

    def features(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The mapped and normalised x, and the log of what was divided out if that does not cancel by itself; or x for ``row_map``
        to do that."""
        if self.row_map is not None:
            return self.feature_map.linear(x), None
        keep_scale = self.attention_norm and self.rule.normaliser == "write"
        return normalised_features(self.feature_map, self.feature_norm, x, keep_scale)

    @torch.no_grad()
    def measure(self, gates: dict[str, Tensor], state: FastWeightState) -> dict[str, Tensor]:
        statistics = {f"gate_{name}": gate.mean() for name, gate in gates.items()}
        if self.rule.coefficients is not None:
            write = self.rule.coefficients(**gates).w
            statistics["write_strength"] = torch.ones((), device=state.memory.device) if write is None else write.mean()
        return statistics | {"state_norm": state.memory.flatten(2).norm(dim=-1).mean()}


def normalised_features(phi: FeatureMap, norm: str, x: Tensor, keep_scale: bool) -> tuple[Tensor, Tensor | None]:
    """phi(x) after --feature-norm; with ``keep_scale``, and where no norm cancels it, the log of what was divided out."""
    if keep_scale and phi.eps < FeatureMap.eps:
        x = wide(x)  # 16 bits do not hold features that small
    if norm == "sum":
        return sum_normalise(phi.scaled(x)[0]), None
    if norm == "l2":
        return l2_normalise(phi(x)), None
    return phi.scaled(x) if keep_scale else (phi(x), None)


def row_map_of(phi: FeatureMap, norm: str) -> RowMap | None:
    """What ``fast_weight`` can do itself: everything after the part of phi that has parameters."""
    return None if phi.row_map is None else RowMap(phi.row_map, getattr(phi, "nu", 1), norm)


def build_feature_map(config, head_dim: int, num_heads: int) -> FeatureMap:
    width = config.feature_dim or head_dim
    if str(config.feature_map) == "dpfp" and config.dpfp_nu >= 2 * width:
        raise ValueError(f"--dpfp-nu is {config.dpfp_nu}; with keys of width {width} per head it must be at most {2 * width - 1}")
    options = {
        "dpfp": {"nu": config.dpfp_nu},
        "favor": {"features": config.favor_features or width, "prescale": config.favor_prescale},
        "rfa": {"features": config.favor_features or width},
        "relu": {"heads": num_heads},
    }
    return FEATURE_MAPS[str(config.feature_map)](width, **options.get(str(config.feature_map), {}))


def check_combination(config, phi: FeatureMap) -> None:
    """Refuses what cannot work, in one sentence that says what to use."""
    name, norm, map_name = str(config.update_rule), str(config.feature_norm), str(config.feature_map)
    rule = RULES[name]
    missing = missing_form(rule, str(config.fast_weight_backend))
    if missing is not None:
        raise ValueError(f"--update-rule {name} has no {missing}; use --fast-weight-backend auto or recurrent")
    if norm == "sum" and not phi.non_negative:
        raise ValueError(f"--feature-norm sum needs a non-negative --feature-map, not {map_name}; use --feature-norm none or l2")
    if config.attention_norm and rule.normaliser is None:
        able = ", ".join(n for n, r in RULES.items() if r.normaliser)
        raise ValueError(f"--attention-norm is not defined for --update-rule {name}; leave it out, or use one of: {able}")
    if config.attention_norm and not phi.non_negative:
        raise ValueError(
            f"--attention-norm divides by sums of features, which {map_name} lets vanish; use elu, relu, dpfp or favor"
        )
    if rule.erases and norm == "none" and not config.attention_norm and not phi.at_most_one:
        better = "sum" if phi.non_negative else "l2"
        raise ValueError(f"--update-rule {name} diverges with keys longer than 1, as {map_name} gives; use --feature-norm {better}")


def initial_bias(bias: float | str, count: int) -> Tensor:
    """A constant, or uniform gate initialisation."""
    if bias == "uniform":
        return torch.logit(torch.empty(count).uniform_(1 / count, 1 - 1 / count)) if count > 2 else torch.zeros(count)
    return torch.full((count,), float(bias))
