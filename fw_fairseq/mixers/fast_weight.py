"""Fast weights as a layer: projections, feature map, gates, memory, output projection."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import Mistake
from ..feature_maps import FEATURE_MAPS, NORMS, wide
from ..ops import FastWeightState, fast_weight
from ..ops.checks import BACKENDS, NORM_OF
from ..ops.dispatch import has_kernels
from ..ops.recall import until_end
from ..rules import RULES, Rule
from .base import Mixer, Setting, rows, settings_of
from .features import (
    build_feature_map,
    check_combination,
    initial_bias,
    normalised_features,
    row_map_of,
    with_room,
)

ROW_UNIT = 8  # columns: 16 bytes of the smallest type


class FastWeight(Mixer):
    """Fast weights with any update rule and feature map. One projection makes q, k, v and every gate of the rule."""

    state_type, takes_source = FastWeightState, True
    settings = settings_of(
        update_rule=Setting("delta", choices=RULES),
        feature_map=Setting("elu", choices=FEATURE_MAPS),
        feature_dim=Setting(0, least=0),
        feature_norm=Setting("sum", choices=NORMS),
        attention_norm=Setting(False),
        attention_norm_of=Setting(NORM_OF[0], choices=NORM_OF),
        dpfp_nu=Setting(1, least=1),
        favor_features=Setting(0, least=0),
        favor_prescale=Setting(False),
        write_strength_init=Setting(0.0, least=0, below=1),
        scale_reads=Setting(False),
        bias_free=Setting(False),
        fast_weight_backend=Setting("auto", choices=BACKENDS),
    )

    def __init__(self, embed_dim: int, heads: int = 1, config=None, **given):
        super().__init__(embed_dim, heads)
        num_heads, config = heads, self.read_settings(config, given)
        self.rule_name, self.feature_norm = str(config.update_rule), str(config.feature_norm)
        self.attention_norm, self.backend = config.attention_norm, str(config.fast_weight_backend)
        self.attention_norm_of = str(config.attention_norm_of)
        self.feature_map = build_feature_map(config, self.head_dim, num_heads)
        check_combination(config, self.feature_map)
        self.row_map = row_map_of(self.feature_map, self.feature_norm)
        key_dim, widths = self.feature_map.head_dim, (self.feature_map.out_dim, self.head_dim)
        self.sizes = {"q": num_heads * key_dim, "k": num_heads * key_dim, "v": embed_dim}
        self.sizes |= {name: num_heads * gate.width(*widths) for name, gate in self.rule.gates.items()}
        biases = not config.bias_free
        self.in_proj = nn.Linear(embed_dim, sum(self.sizes.values()), bias=biases)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=biases)
        self.read_scale = self.head_dim**-0.5 if config.scale_reads else 1.0
        self.write_strength_init = config.write_strength_init
        strength = [] if self.rule.coefficients is None else ["write_strength"]
        self.watched, self.keeps_state_norm = False, False  # see ``watch``
        self.state_norm: Tensor | None = None  # with its gradient
        names = [*(f"gate_{name}" for name in self.rule.gates), *strength, "state_norm"]
        self.last_statistics: dict[str, Tensor | None] = dict.fromkeys(names)
        self.reset_parameters()

    @property
    def rule(self) -> Rule:
        """The update rule. It is looked up each time, since its functions do not pickle."""
        return RULES[self.rule_name]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws weights as fairseq's attention does; gates start at the biases that their rule asks for."""
        sizes, gates = list(self.sizes.values()), self.rule.gates
        biases = [None] * len(sizes) if self.in_proj.bias is None else self.in_proj.bias.split(sizes)
        for name, weight, bias in zip(self.sizes, self.in_proj.weight.split(sizes), biases):
            nn.init.xavier_uniform_(weight, gain=1 / math.sqrt(2))
            if bias is not None:
                bias.copy_(initial_bias(gates[name], len(bias), self.write_strength_init) if name in gates else bias.new_zeros(()))
        nn.init.xavier_uniform_(self.out_proj.weight)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor], Tensor | None]:
        """Maps x (T,B,C) to q, k, v (B,H,T,...), the gates and the log scale of keys, as ``fast_weight`` takes them."""
        qk_size, _, *sizes = self.sizes.values()
        projected = self.project(x)
        rest = projected.shape[-1] - sum(self.sizes.values())
        qk, v, *gates = projected.split([2 * qk_size, *sizes, rest], dim=-1)
        (q, k), log_scale = self.features(qk.unflatten(-1, (2, self.num_heads, -1)).permute(2, 1, 3, 0, 4))  # (2,B,H,T,X)
        key_log_scale = None if log_scale is None else log_scale[1]
        v = self.by_head(v)
        return q, k, v, {name: self.gate(name, part) for name, part in zip(self.rule.gates, gates)}, key_log_scale

    def project(self, x: Tensor) -> Tensor:
        """The rows of ``in_proj`` for x. Kernels read many tokens 16 bytes at a time; for them columns of 0 fill the rows up to a
        multiple of 8 columns."""
        missing = -self.in_proj.out_features % ROW_UNIT
        if missing == 0 or len(x) == 1 or not has_kernels(x):
            return self.in_proj(x)
        if not isinstance(self.in_proj, nn.Linear):
            return F.pad(self.in_proj(x), (0, missing))
        bias = None if self.in_proj.bias is None else F.pad(self.in_proj.bias, (0, missing))
        return F.linear(x, F.pad(self.in_proj.weight, (0, 0, 0, missing)), bias)

    def forward(
        self,
        x: Tensor,
        state: FastWeightState | None = None,
        padding_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
        *,
        decoding: bool = False,
        group=None,
        source: Tensor | None = None,
    ) -> tuple[Tensor, FastWeightState]:
        q, k, v, gates, key_log_scale = self.operands(x if source is None else source)
        y, state = fast_weight(
            q, k, v.to(q.dtype), self.rule_name, gates, state, self.backend, self.attention_norm, self.feature_map.eps,
            padding_mask=padding_mask, key_log_scale=key_log_scale, reset_mask=reset_mask, feature_map=self.row_map,
            decoding=decoding, group=group, attention_norm_of=self.attention_norm_of,
        )  # fmt: skip
        if self.training and self.watched:
            self.last_statistics = self.measure(gates, state)
            self.state_norm = state.memory.flatten(2).norm(dim=-1).mean() if self.keeps_state_norm else None
        return self.out_proj(self.join(y.to(v.dtype)) * self.read_scale), state

    def projections(self) -> dict[str, dict[str, slice]]:
        return {"in_proj": rows(**{f"gate {name}" if name in self.rule.gates else name: n for name, n in self.sizes.items()})}

    def pretrained(self) -> dict[str, slice]:
        start = self.sizes["q"] + self.sizes["k"]
        values, whole = slice(start, start + self.sizes["v"]), slice(None)
        return {"in_proj.weight": values, "in_proj.bias": values, "out_proj.weight": whole, "out_proj.bias": whole}

    def explain(self, x: Tensor) -> dict[str, Tensor]:
        """The last token's read is linear in the values, so that values with one channel per token read their weights."""
        if self.rule.coefficients is None:
            raise Mistake(f"--update-rule {self.rule_name} has no weights of past tokens: its memory is not linear in the values")
        q, k, _, gates, key_log_scale = self.operands(x)
        decay = {name: gate for name, gate in gates.items() if self.rule.gates[name].axis == "V"}
        ones = torch.eye(len(x), dtype=k.dtype, device=x.device).expand(*k.shape[:2], -1, -1)
        plain = gates | {name: gate.new_ones(*gate.shape[:3], len(x)) for name, gate in decay.items()}
        y, _ = fast_weight(
            q, k, ones, self.rule_name, plain, None, self.backend, self.attention_norm, self.feature_map.eps,
            key_log_scale=key_log_scale, feature_map=self.row_map, attention_norm_of=self.attention_norm_of,
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

    def watch(self, keeps_state_norm: bool) -> None:
        """With ``keeps_state_norm``, the next training forward also leaves ``state_norm``, with its gradient."""
        self.watched, self.keeps_state_norm = True, keeps_state_norm
        self.last_statistics, self.state_norm = dict.fromkeys(self.last_statistics), None

    def take_state_norm(self) -> Tensor | None:
        """Returns ``state_norm`` and forgets it: it is in a graph, which a copy of the model could not hold."""
        norm, self.state_norm = self.state_norm, None
        return norm

    def statistics(self) -> dict[str, Tensor | None]:
        return self.last_statistics

    @torch.no_grad()
    def measure(self, gates: dict[str, Tensor], state: FastWeightState) -> dict[str, Tensor]:
        statistics = {f"gate_{name}": gate.mean() for name, gate in gates.items()}
        if self.rule.coefficients is not None:
            write = self.rule.coefficients(**gates).w
            statistics["write_strength"] = torch.ones((), device=state.memory.device) if write is None else write.mean()
        return statistics | {"state_norm": state.memory.flatten(2).norm(dim=-1).mean()}
