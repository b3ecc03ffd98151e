"""Attention to a fixed number of slots, which add up keys and values: ABC (Peng et al. 2022), a causal Linformer, and gated slot
attention (Zhang et al. 2024)."""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..feature_maps import wide
from ..ops import FastWeightState, fast_weight
from ..ops.checks import check_masks, check_sequences, check_tokens
from ..ops.state import tensor_state
from ..rules.gates import root8
from .base import Mixer, rows
from .look_back import places_in_texts
from .parts.output import ChannelNorm

LIMIT = 20.0  # the bound of the exponents: a slot's weights differ by a factor of up to exp(40), and their sums stay within fp32


@tensor_state
class BoundedState(NamedTuple):
    """The slots of keys and of values, their summed weights (ABC), and the number of tokens so far (Linformer)."""

    keys: Tensor  # (B,H,D,N): sums over tokens of k_t w_t^T
    values: Tensor  # (B,H,N,D): sums of w_t v_t^T
    weights: Tensor | None = None  # (B,H,1,N): sums of w_t
    position: Tensor | None = None  # (B): how many tokens there were


class Bounded(Mixer):
    """y_t = W V_t^T softmax(K_t q_t / sqrt(d)), with N slots of keys and values, K_t = sum_{s<=t} w_s k_s^T, V_t likewise.

    Reading takes two passes of the sum rule: a query reads the slots' keys, and the softmax of that result reads their
    values.
    """

    state_type, takes_source = BoundedState, True
    settings: ClassVar[tuple[str, ...]] = ("slots", "fast_weight_backend")
    bias = True  # of the projections

    def __init__(self, embed_dim: int, heads: int = 1, config: Any = None, **given) -> None:
        super().__init__(embed_dim, heads)
        settings = self.read_settings(config, given)
        self.slots, self.backend = settings.slots, str(settings.fast_weight_backend)
        width = 3 * embed_dim + self.weights_of_a_token()
        self.in_proj = nn.Linear(embed_dim, width, bias=self.bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=self.bias)
        self.reset_parameters()

    def weights_of_a_token(self) -> int:
        """How many of them the input projection makes."""
        return self.num_heads * self.slots

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v (T,B,C) and what makes the weights (T,B,X)."""
        return self.in_proj(x).split([self.embed_dim] * 3 + [self.weights_of_a_token()], -1)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for weight in self.in_proj.weight.split(self.embed_dim):
            nn.init.xavier_uniform_(weight, gain=1 / math.sqrt(2))
        nn.init.xavier_uniform_(self.out_proj.weight)
        for linear in (self.in_proj, self.out_proj) if self.bias else ():
            nn.init.zeros_(linear.bias)

    def projections(self) -> dict[str, dict[str, slice]]:
        width = self.embed_dim
        return {"in_proj": rows(q=width, k=width, v=width, weights=self.in_proj.out_features - 3 * width)}

    def read(
        self, parts: list[Tensor], weights: Tensor, state: BoundedState | None, masks: dict, means: bool
    ) -> tuple[Tensor, BoundedState]:
        """Maps q, k, v (T,B,C) and weights (B,H,T,N) to y (T,B,C) and the state. With ``means``, slots are means instead of
        sums."""
        q, k, v = (wide(self.by_head(part)) for part in parts)
        keys, values, totals = (None, None, None) if state is None else state[:3]
        scores, keys = self.sums(q * self.head_dim**-0.5, k, weights, keys, masks)
        if means:
            of_q, of_k = (torch.ones_like(part[..., :1]) for part in (q, k))  # two tensors, as the inputs of a graph must be
            total, totals = self.sums(of_q, of_k, weights, totals, masks)
            total = torch.where(total > 0, total, 1)  # 0 before the first token, at padding
            scores = scores / total
        shares = scores.softmax(-1)
        y, values = self.sums(shares / total if means else shares, weights, v, values, masks)
        return self.out_proj(self.join(y.to(parts[0].dtype))), BoundedState(keys, values, totals if means else None)

    def sums(self, q: Tensor, k: Tensor, v: Tensor, memory: Tensor | None, masks: dict) -> tuple[Tensor, Tensor]:
        """Runs the sum rule and returns its output and its memory."""
        return self.run("sum", {}, q, k, v, memory, masks)

    def run(
        self, rule: str, gates: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, memory: Tensor | None, masks: dict
    ) -> tuple[Tensor, Tensor]:
        """Runs a rule and returns its output and its memory."""
        y, state = fast_weight(q, k, v, rule, gates, None if memory is None else FastWeightState(memory), self.backend, **masks)
        return y, cast("Tensor", state.memory)


class Abc(Bounded):
    """ABC_MLP: the weights are w_t = exp(W_w x_t), with exponents from -20 to 20, and each slot is a mean weighted by them."""

    def forward(
        self,
        x: Tensor,
        state: BoundedState | None = None,
        padding_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
        source: Tensor | None = None,
        **unused,
    ) -> tuple[Tensor, BoundedState]:
        *parts, scores = self.parts(x if source is None else source)
        weights = wide(self.by_head(scores)).clamp(-LIMIT, LIMIT).exp()
        return self.read(parts, weights, state, {"padding_mask": padding_mask, "reset_mask": reset_mask}, means=True)


class Gsa(Bounded):
    """Gated slot attention: g_t = sigmoid(W_g x_t)^(1/8) for each slot, K_t = g_t * K_{t-1} + (1 - g_t) k_t^T, V_t likewise, and
    y_t = W RMSNorm(silu(V_t^T softmax(K_t q_t))), with the SiLU of queries, keys and values."""

    settings = (*Bounded.settings, "output_norm_eps")
    bias = False

    def __init__(self, embed_dim: int, heads: int = 1, config: Any = None, **given) -> None:
        super().__init__(embed_dim, heads, config, **given)
        eps = self.read_settings(config, given).output_norm_eps
        self.sizes = {"q": embed_dim, "k": embed_dim, "v": embed_dim, "f": self.weights_of_a_token()}  # of in_proj's rows
        self.norm = ChannelNorm(heads, self.head_dim, centred=False, eps=eps)

    def forward(
        self,
        x: Tensor,
        state: BoundedState | None = None,
        padding_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
        source: Tensor | None = None,
        **unused,
    ) -> tuple[Tensor, BoundedState]:
        *parts, gates = self.parts(x if source is None else source)
        q, k, v = (F.silu(wide(self.by_head(part))) for part in parts)
        g, (keys, values) = root8(wide(self.by_head(gates))), (None, None) if state is None else state[:2]
        masks = {"padding_mask": padding_mask, "reset_mask": reset_mask}
        scores, keys = self.run("decay", {"f": torch.ones_like(k), "z": g}, q, k, 1 - g, keys, masks)
        y, values = self.run("hgrn2", {"f": g}, scores.softmax(-1), torch.ones_like(g), v, values, masks)
        return self.out_proj(self.join(self.norm(F.silu(y)).to(parts[0].dtype))), BoundedState(keys, values)


class Linformer(Bounded):
    """The weights w_t are a learned vector for each position. After ``--slot-positions`` positions, the last vector serves."""

    settings = ("slot_positions", *Bounded.settings)

    def __init__(self, embed_dim: int, heads: int = 1, config: Any = None, **given) -> None:
        super().__init__(embed_dim, heads, config, **given)
        places = self.read_settings(config, given).slot_positions
        self.position_weight = nn.Parameter(torch.randn(places, heads, self.slots) / math.sqrt(self.slots))

    def weights_of_a_token(self) -> int:
        return 0

    def forward(
        self,
        x: Tensor,
        state: BoundedState | None = None,
        padding_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
        source: Tensor | None = None,
        **unused,
    ) -> tuple[Tensor, BoundedState]:
        check_tokens("x", x, len(x))
        check_masks(padding_mask, reset_mask, (x.shape[1], x.shape[0]))
        start: Any = x.new_zeros(x.shape[1], dtype=torch.long) if state is None else state.position
        check_sequences(start, x.shape[1])
        places, end = places_in_texts(start, x.shape[0], padding_mask, reset_mask)
        weights = wide(self.position_weight)[places.clamp(max=len(self.position_weight) - 1)].transpose(1, 2)  # (B,H,T,N)
        masks = {"padding_mask": padding_mask, "reset_mask": reset_mask}
        *parts, _ = self.parts(x if source is None else source)
        y, state = self.read(parts, weights, state, masks, means=False)
        return y, state._replace(position=end)
