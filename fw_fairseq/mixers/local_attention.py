"""Softmax attention to a window: plain, and with the relative positions of Transformer-XL."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import Mixer, is_linear, rows
from .look_back import Reach, View, WindowState, attend, look_back, with_memory
from .options import MixerOptions


class LocalAttention(Mixer):
    """y_t = W sum_s softmax(q_t k_s / sqrt(d)) v_s over the last ``--local-window`` tokens s, t among them.

    The layer's inputs carry over to the next segment, without gradients; their keys and values are projected anew.
    """

    state_type, takes_source = WindowState, True
    settings: ClassVar[tuple[str, ...]] = ("local_window", "attention_dropout", "bias_free")

    def __init__(self, embed_dim: int, heads: int = 1, config: Any = None, **given) -> None:
        super().__init__(embed_dim, heads)
        settings = self.read_settings(config, given)
        self.reach, self.attention_dropout = self.reach_of(settings), settings.attention_dropout
        biases = not settings.bias_free
        self.in_proj, self.out_proj = (nn.Linear(embed_dim, count * embed_dim, bias=biases) for count in (3, 1))
        self.reset_parameters()

    @staticmethod
    def reach_of(settings: MixerOptions) -> Reach:
        return Reach(settings.local_window - 1)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for weight in self.in_proj.weight.chunk(3):
            nn.init.xavier_uniform_(weight, gain=1 / math.sqrt(2))
        nn.init.xavier_uniform_(self.out_proj.weight)
        for linear in (self.in_proj, self.out_proj):
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def forward(
        self,
        x: Tensor,
        state: WindowState | None = None,
        padding_mask: Tensor | None = None,
        reset_mask: Tensor | None = None,
        *,
        decoding: bool = False,
        source: Tensor | None = None,
        **unused,
    ) -> tuple[Tensor, WindowState]:
        x = x if source is None else source
        q, kv = self.in_proj(x).split([self.embed_dim, 2 * self.embed_dim], -1)
        inputs = x.transpose(0, 1)
        view = look_back(inputs, state, self.reach, padding_mask, reset_mask)
        kv, state = with_memory(view, inputs, kv.transpose(0, 1), state, self.keys_and_values, decoding)
        k, v = map(self.by_head, kv.transpose(0, 1).chunk(2, -1))
        return self.out_proj(self.join(self.read(self.by_head(q), k, v, view))), state

    def keys_and_values(self, inputs: Tensor) -> Tensor:
        """Maps inputs (B,R,C) to their keys and values (B,R,2C)."""
        if hasattr(self.in_proj, "rows"):  # sparse projections
            sparse: Any = self.in_proj
            return sparse.rows(inputs, "k", "v")
        if not is_linear(self.in_proj):
            return self.in_proj(inputs)[..., self.embed_dim :]
        weight, bias = self.in_proj.weight, self.in_proj.bias
        return F.linear(inputs, weight[self.embed_dim :], None if bias is None else bias[self.embed_dim :])

    def read(self, q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
        return attend(q, k, v, view, dropout=self.dropout_now())

    def dropout_now(self) -> float:
        """Returns the dropout probability of the attention weights, which is 0 outside training."""
        return self.attention_dropout if self.training else 0.0

    def explain(self, x: Tensor) -> dict[str, Tensor]:
        """Returns the attention weights of the last token. With one channel of values per token, the output is the weights."""
        q, kv = self.in_proj(x).split([self.embed_dim, 2 * self.embed_dim], -1)
        view = look_back(x.transpose(0, 1), None, self.reach, None, None)
        k, _ = map(self.by_head, kv.chunk(2, -1))
        each = torch.eye(len(x), dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
        return {"attention": self.read(self.by_head(q), k, each, view)[0, :, -1]}

    def projections(self) -> dict[str, dict[str, slice]]:
        return {"in_proj": rows(q=self.embed_dim, k=self.embed_dim, v=self.embed_dim)}

    def pretrained(self) -> dict[str, slice]:
        return {f"{linear}.{kind}": slice(None) for linear in ("in_proj", "out_proj") for kind in ("weight", "bias")}

    def state_size(self) -> int:
        """Returns the size of the keys and values of memory and segment, as Schlag et al. 2021 count them. Without segments, the
        token that reads counts too. A state between segments holds the inputs, half as much."""
        return 2 * self.embed_dim * (self.reach.memory + self.reach.segment)


class TransformerXl(LocalAttention):
    """Attention of Dai et al. 2019: scores are (q_t + a) k_s + (q_t + b) W_r r_{t-s}, and r holds sinusoids of the distance.

    Each token sees the ``--xl-memory`` tokens before it, however the text is cut. With ``--xl-segment`` L, token i of each L tokens
    of a text sees i more, as in Dai et al. No parameter depends on either number, so you can try others in evaluation:
    fairseq-eval-lm --model-overrides "{'xl_memory': 128, 'xl_segment': 128}".
    """

    settings = ("xl_memory", "xl_segment", "attention_dropout", "bias_free")

    def __init__(self, embed_dim: int, heads: int = 1, config: Any = None, **given) -> None:
        super().__init__(embed_dim, heads, config, **given)
        self.position_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        nn.init.xavier_uniform_(self.position_proj.weight, gain=1 / math.sqrt(2))
        self.content_bias, self.position_bias = (nn.Parameter(torch.zeros(heads, 1, self.head_dim)) for _ in range(2))

    @staticmethod
    def reach_of(settings: MixerOptions) -> Reach:
        return Reach(settings.xl_memory, settings.xl_segment)

    def read(self, q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
        """Returns the output of attention with relative positions, (B,H,T,X)."""
        distances = sinusoids(view.most + 1, self.embed_dim, q).to(q.dtype)
        r = self.position_proj(distances).unflatten(-1, (self.num_heads, -1)).transpose(0, 1)  # (H,R+1,D)
        between = self.position_bias - self.content_bias

        def by_distance(q: Tensor, back: Tensor) -> Tensor:
            scores = (q + between) @ r.mT * self.head_dim**-0.5  # (B,H,t,R+1)
            return scores.gather(3, back.clamp(0, view.most)[:, None].expand(*scores.shape[:2], -1, -1))

        return attend(q + self.content_bias, k, v, view, by_distance, self.dropout_now())


def sinusoids(count: int, width: int, like: Tensor) -> Tensor:
    """Returns the sinusoids of the distances below ``count``, (count, width), in fp32, or in float64 where ``like`` has it."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    frequencies = 10000 ** -(torch.arange(0, width, 2, device=like.device, dtype=dtype) / width)
    angles = torch.arange(count, device=like.device)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], 1)[:, :width]
