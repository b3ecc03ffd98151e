"""Fast weights as a layer: projections, feature map, gates, memory, output projection.

``around.operands`` has the first half of it, which makes what the operation takes, and ``around`` the parts that published layers
have beside the recurrence: gates with parameters of their own, a short convolution, a norm and a gate of the output.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import Mistake
from ..ops import FastWeightState, fast_weight
from ..ops.recall import until_end
from .parts.operands import Projected
from .parts.output import HeadNorm


class FastWeight(Projected):
    """Fast weights with any update rule and feature map. One projection makes q, k, v and every gate of the rule."""

    state_type, takes_source = FastWeightState, True
    settings = (
        "update_rule", "feature_map", "feature_dim", "feature_norm", "attention_norm", "attention_norm_of", "dpfp_nu",
        "favor_features", "favor_prescale", "write_strength_init", "product_steps", "negative_eigenvalues", "key_heads",
        "short_conv", "token_shift", "token_shift_rank", "rotary", "value_mixing_rank", "output_norm", "output_gate",
        "scale_reads", "scale_after_norm", "bias_free", "fast_weight_backend",
    )  # fmt: skip

    def __init__(self, embed_dim: int, heads: int = 1, config=None, *, layer: int = 0, layers: int = 1, **given):
        config = self.read_settings(config, given)
        super().__init__(embed_dim, heads, config, layer, layers)
        self.backend, self.attention_norm_of = str(config.fast_weight_backend), str(config.attention_norm_of)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=not config.bias_free)
        scale = self.head_dim**-0.5 if config.scale_reads else 1.0
        of_norm, self.read_scale = (scale, 1.0) if config.output_norm and not config.scale_after_norm else (1.0, scale)
        self.norm = HeadNorm(self.head_dim, of_norm) if config.output_norm else None
        strength = [] if self.rule.coefficients is None else ["write_strength"]
        self.watched = False  # see ``watch``
        self.state_norm: Tensor | None = None  # with its gradient
        names = [*(f"gate_{name}" for name in self.rule.gates), *strength, "state_norm"]
        self.last_statistics: dict[str, Tensor | None] = dict.fromkeys(names)
        self.reset_parameters()

    @staticmethod
    def of_before(options: dict) -> dict[str, bool]:
        """Returns what stored options that are older than --scale-after-norm lack, to compute what they did."""
        scaled = options.get("scale_reads") and options.get("output_norm") and "scale_after_norm" not in options
        return {"scale_after_norm": True} if scaled else {}

    @classmethod
    def of_layer(cls, embed_dim: int, num_heads: int, config, layer: int, layers: int) -> FastWeight:
        return cls(embed_dim, num_heads, config, layer=layer, layers=layers)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws weights as fairseq's attention does; gates start at the biases that their rule asks for."""
        super().reset_parameters()
        nn.init.xavier_uniform_(self.out_proj.weight)
        if self.out_proj.bias is not None:
            nn.init.zeros_(self.out_proj.bias)

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
        shared: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, FastWeightState]:
        read = x if source is None else source
        q, k, v, gates, key_log_scale, gate, mixing, kept = self.operands(read, state, padding_mask, reset_mask)
        if self.takes_shared:
            v = self.with_first_values(v, mixing, shared)
        y, state = fast_weight(
            q, k, v.to(q.dtype), self.rule_name, gates, state, self.backend, self.attention_norm, self.feature_map.eps,
            padding_mask=padding_mask, key_log_scale=key_log_scale, reset_mask=reset_mask, feature_map=self.row_map,
            decoding=decoding, group=group, attention_norm_of=self.attention_norm_of,
        )  # fmt: skip
        if self.training and self.watched:
            self.last_statistics = self.measure(gates, state, padding_mask)
            self.state_norm = state.memory.flatten(2).norm(dim=-1).mean() if self.keeps_state_norm else None
        return self.output(y.to(v.dtype), gate), state._replace(**kept) if kept else state

    def output(self, y: Tensor, gate: Tensor | None) -> Tensor:
        """Maps what the heads read, (B,H,T,V), and the gate before its SiLU to the layer's output (T,B,C)."""
        y = self.join(y if self.norm is None else self.norm(y))
        y = y if self.read_scale == 1 else y * self.read_scale
        return self.out_proj(y if gate is None else y * F.silu(gate))

    def pretrained(self) -> dict[str, slice]:
        start = self.sizes["q"] + self.sizes["k"]
        values, whole = slice(start, start + self.sizes["v"]), slice(None)
        return {"in_proj.weight": values, "in_proj.bias": values, "out_proj.weight": whole, "out_proj.bias": whole}

    @property
    def plain(self) -> bool:
        return super().plain and self.norm is None

    def explain(self, x: Tensor) -> dict[str, Tensor]:
        """The last token's read is linear in the values, so that values with one channel per write read their weights."""
        if self.rule.coefficients is None:
            raise Mistake(f"--update-rule {self.rule_name} has no weights of past tokens: its memory is not linear in the values")
        q, k, _, gates, key_log_scale, *_ = self.operands(x)
        of_values = {name: gate for name, gate in gates.items() if self.rule.gates[name].axis == "V"}
        ones = torch.eye(k.shape[2], dtype=k.dtype, device=x.device).expand(*k.shape[:2], -1, -1)
        plain = gates | {name: gate.new_ones(*gate.shape[:3], k.shape[2]) for name, gate in of_values.items()}
        y, _ = fast_weight(
            q, k, ones, self.rule_name, plain, None, self.backend, self.attention_norm, self.feature_map.eps,
            key_log_scale=key_log_scale, feature_map=self.row_map, attention_norm_of=self.attention_norm_of,
        )  # fmt: skip
        coefficients = self.rule.coefficients(**gates)
        read, write = y[0, :, -1], coefficients.w
        if coefficients.z is not None:
            read = read * until_end(coefficients.z)[0].exp().mean(-1)
        write = torch.ones_like(read) if write is None else write[0]
        if write.dim() == 3:  # a strength per channel, which the values above do not have
            write = write.mean(-1)
            read = read * write
        read, write = (part.unflatten(-1, (-1, self.writes)).sum(-1) for part in (read, write))
        return {"read": read, "write": write}

    def why_not_across_workers(self) -> str | None:
        if self.rule.coefficients is None:
            return f"--update-rule {self.rule_name} has steps of its own, which workers cannot take apart"
        parts = {"--short-conv": self.conv is not None, "--token-shift": self.shift is not None, "--rotary": self.rotary}
        for named, present in parts.items():
            if present:
                return f"{named} needs the tokens of the worker before it; leave it out"
        return None

    def redraw(self, keep: bool = False) -> None:
        self.feature_map.redraw(keep)

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
    def measure(self, gates: dict[str, Tensor], state: FastWeightState, padding_mask: Tensor | None) -> dict[str, Tensor]:
        statistics = {f"gate_{name}": mean_of_tokens(gate, padding_mask) for name, gate in gates.items()}
        if self.rule.coefficients is not None:
            write = self.rule.coefficients(**gates).w
            one = torch.ones((), device=state.memory.device)
            statistics["write_strength"] = one if write is None else mean_of_tokens(write, padding_mask)
        return statistics | {"state_norm": state.memory.flatten(2).norm(dim=-1).mean()}


def mean_of_tokens(x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Returns the mean of x, (B,H,n T) or (B,H,n T,C), over what belongs to tokens; 0 where all is padding. padding_mask: (B,T)."""
    if padding_mask is None:
        return x.mean()
    hidden = padding_mask.repeat_interleave(x.shape[2] // padding_mask.shape[1], 1)[:, None]
    hidden = hidden if x.dim() == 3 else hidden[..., None]
    count = (~hidden).sum() * (x.numel() // (x.shape[0] * x.shape[2]))
    return x.masked_fill(hidden, 0).sum() / count.clamp(min=1)
