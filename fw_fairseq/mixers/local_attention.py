"""Softmax attention to a window: plain, and with the relative positions of Transformer-XL."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .base import Mixer, rows
from .look_back import View, WindowState, attend, look_back


class LocalAttention(Mixer):
    """y_t = W sum_s softmax(q_t k_s / sqrt(d)) v_s over the last ``--local-window`` tokens s, t among them.

    The window's keys and values carry over to the next segment, without gradients.
    """

    state_type, options = WindowState, ("local_window",)

    def __init__(self, embed_dim: int, num_heads: int, config):
        super().__init__(embed_dim, num_heads)
        self.memory = self.memory_of(config)
        self.in_proj, self.out_proj = nn.Linear(embed_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)
        self.reset_parameters()

    @staticmethod
    def memory_of(config) -> int:
        """Returns the number of tokens that each one sees before itself."""
        return config.local_window - 1

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the weights as fairseq's attention does."""
        for weight in self.in_proj.weight.chunk(3):
            nn.init.xavier_uniform_(weight, gain=1 / math.sqrt(2))
        nn.init.xavier_uniform_(self.out_proj.weight)
        for linear in (self.in_proj, self.out_proj):
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor, state: WindowState | None = None, padding_mask=None, reset_mask=None, **unused):
        """Maps x (T,B,C) to y (T,B,C) and the state after the last token."""
        q, kv = self.in_proj(x).split([self.embed_dim, 2 * self.embed_dim], -1)
        view, state = look_back(kv.transpose(0, 1), state, self.memory, padding_mask, reset_mask)
        k, v = map(self.by_head, view.tokens.transpose(0, 1).chunk(2, -1))
        return self.out_proj(self.join(self.read(self.by_head(q), k, v, view))), state

    def read(self, q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
        """Returns the output of attention, (B,H,T,X)."""
        return attend(q, k, v, view)

    def explain(self, x: Tensor) -> dict[str, Tensor]:
        """Returns the attention weights of the last token. With one channel of values per token, the output is the weights."""
        q, kv = self.in_proj(x).split([self.embed_dim, 2 * self.embed_dim], -1)
        view, _ = look_back(kv.transpose(0, 1), None, self.memory, None, None)
        k, _ = map(self.by_head, kv.chunk(2, -1))
        each = torch.eye(len(x), dtype=k.dtype, device=k.device).expand(*k.shape[:2], -1, -1)
        return {"attention": self.read(self.by_head(q), k, each, view)[0, :, -1]}

    def projections(self) -> dict[str, dict[str, slice]]:
        """Maps the input projection to the rows of each of its parts."""
        return {"in_proj": rows(q=self.embed_dim, k=self.embed_dim, v=self.embed_dim)}

    def pretrained(self) -> dict[str, slice]:
        """Returns all rows of both projections, as fw-convert copies them all."""
        return {f"{linear}.{kind}": slice(None) for linear in ("in_proj", "out_proj") for kind in ("weight", "bias")}

    def state_size(self) -> int:
        """Returns the size of keys and values. The token that reads counts too, as in Schlag et al. 2021."""
        return 2 * self.embed_dim * (self.memory + 1)


class TransformerXl(LocalAttention):
    """Attention of Dai et al. 2019: scores are (q_t + a) k_s + (q_t + b) W_r r_{t-s}, and r holds sinusoids of the distance.

    Each token sees the ``--xl-memory`` tokens before it, however the text is cut. No parameter depends on that number, so you
    can try another one in evaluation: fairseq-eval-lm --model-overrides "{'xl_memory': 128}".
    """

    options = ("xl_memory",)

    def __init__(self, embed_dim: int, num_heads: int, config):
        super().__init__(embed_dim, num_heads, config)
        self.position_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        nn.init.xavier_uniform_(self.position_proj.weight, gain=1 / math.sqrt(2))
        self.content_bias, self.position_bias = (nn.Parameter(torch.zeros(num_heads, 1, self.head_dim)) for _ in range(2))

    @staticmethod
    def memory_of(config) -> int:
        """Returns the number of tokens that each one sees before itself."""
        return config.xl_memory

    def read(self, q: Tensor, k: Tensor, v: Tensor, view: View) -> Tensor:
        """Returns the output of attention with relative positions, (B,H,T,X)."""
        distances = sinusoids(self.memory + 1, self.embed_dim, q.device).to(q.dtype)
        r = self.position_proj(distances).unflatten(-1, (self.num_heads, -1)).transpose(0, 1)  # (H,R+1,D)
        between = self.position_bias - self.content_bias

        def by_distance(q: Tensor, back: Tensor) -> Tensor:
            scores = (q + between) @ r.mT * self.head_dim**-0.5  # (B,H,t,R+1)
            return scores.gather(3, back.clamp(0, self.memory)[:, None].expand(*scores.shape[:2], -1, -1))

        return attend(q + self.content_bias, k, v, view, by_distance)


def sinusoids(count: int, width: int, device) -> Tensor:
    """Returns the sinusoids of the distances below ``count``, (count, width), in fp32."""
    frequencies = 10000 ** -(torch.arange(0, width, 2, device=device) / width)
    angles = torch.arange(count, device=device)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], 1)[:, :width]
