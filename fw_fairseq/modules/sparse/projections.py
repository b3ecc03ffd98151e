"""Sparse queries, keys and values: a multiplicative dense layer that they share, and a causal convolution for each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import Mistake
from ...mixers.parts.convolution import EarlierTokens
from ...ops.state import tensor_state
from ..linear_attention import LinearAttention
from ..stateful import MixerAttention, StatefulModule
from .gathered import gained, rows_product

BEFORE = 2  # tokens that a convolution reads before its own
TAPS = BEFORE + 1  # of time: the token and those before it
SIDES = 3  # modules that queries and keys read: their own and both neighbours
ALONE = ("v", "input")  # parts that read their own module only
CONVOLVED = ("q", "k", "v", "f")  # parts that are convolutions at any width; others only at the width of the layer


class Multiplicative(nn.Module):
    """y[n] = (x * G[n]) P for n = 1..M, side by side, plus a bias: M I + I O/M + O weights in place of I O.

    Where M does not divide O, the last module has outputs that are left out.
    """

    def __init__(self, in_features: int, out_features: int, count: int) -> None:
        super().__init__()
        self.in_features, self.out_features, self.count = in_features, out_features, count
        self.gains = nn.Parameter(torch.empty(count, in_features))  # G
        self.weight = nn.Parameter(torch.empty(-(-out_features // count), in_features))  # P^T
        self.bias = nn.Parameter(torch.empty(out_features))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the weights as published."""
        nn.init.normal_(self.gains, std=0.5)
        nn.init.xavier_uniform_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (...,I) to (...,O)."""
        return gained(x, self.gains, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, count={self.count}"


@tensor_state
class RecentState(NamedTuple):
    """The vectors of the last two tokens of a text, 0 where there was none."""

    vectors: Tensor  # (B,2,C), the last token first


def with_recent(
    p: Tensor, state: RecentState | None, padding_mask: Tensor | None = None, reset_mask: Tensor | None = None
) -> tuple[Tensor, RecentState]:
    """Maps p (T,B,C) to [p_t, p_{t-1}, p_{t-2}] (T,B,3C), with 0 before a text begins, and to the state after the last token.

    ``padding_mask`` (B,T): padding counts as no token. ``reset_mask`` (B,T): True at the first token of a new text.
    """
    recent = None if state is None else state.vectors.to(p).flip(1)
    earlier = EarlierTokens(p, recent, BEFORE, padding_mask, reset_mask)
    before = [earlier.in_place(earlier.back(tokens)) for tokens in range(1, BEFORE + 1)]
    return torch.cat([p, *before], -1), RecentState(earlier.recent().flip(1))


class Convolutions(nn.Module):
    """Maps [p_t, p_{t-1}, p_{t-2}] (...,3C) to the parts of a projection, side by side.

    p consists of S modules. A part of width X has X/S channels in each: a convolution over time and modules with one set of weights
    for all modules, 3 tokens by 3 modules for queries, keys and gates, 3 tokens by 1 module for values. Narrow parts, as a gate of
    one number per head, are dense rows that read p_t.
    """

    def __init__(self, width: int, count: int, parts: dict[str, int], start: nn.Linear | None = None) -> None:
        """``start``: a dense projection with these rows. Biases, and the weights of narrow parts, start as its own."""
        super().__init__()
        self.width, self.count, self.parts = width, count, dict(parts)
        self.in_features, self.out_features = TAPS * width, sum(parts.values())
        self.weights = nn.ParameterDict()
        for name, size in parts.items():
            if name not in CONVOLVED and size != width:
                self.weights[name] = nn.Parameter(torch.empty(size, width))
                continue
            if size % count:
                raise Mistake(f"--qkv-sparsity is {count}; it must divide {size}, the width of {name} of all heads")
            sides = 1 if name in ALONE else SIDES
            self.weights[name] = nn.Parameter(torch.empty(size // count, sides, TAPS, width // count))
        self.bias = nn.Parameter(torch.zeros(self.out_features)) if start is None or start.bias is not None else None
        self.reset_parameters(start)

    @torch.no_grad()
    def reset_parameters(self, start: nn.Linear | None = None) -> None:
        """Draws the weights from Glorot's distribution."""
        sizes = list(self.parts.values())
        rows = [None] * len(sizes) if start is None else start.weight.split(sizes)
        for weight, given in zip(self.weights.values(), rows):
            if weight.dim() == 2 and given is not None:
                weight.copy_(given)
            else:
                nn.init.xavier_uniform_(weight.flatten(1))
        if self.bias is not None and start is not None:
            self.bias.copy_(start.bias)

    def forward(self, source: Tensor) -> Tensor:
        """Maps (...,3C) to (..., sum of the parts' widths)."""
        y = self.some(source, self.parts)
        return y if self.bias is None else y + self.bias

    def some(self, source: Tensor, names: Iterable[str]) -> Tensor:
        """The parts of these names, without their biases."""
        modules = source.unflatten(-1, (TAPS, self.count, -1))  # (...,3,S,C/S)
        by_module = modules.transpose(-3, -2)  # (...,S,3,C/S)
        around: Tensor | None = None
        found = []
        for name in names:
            weight = self.weights[name]
            if weight.dim() == 2:
                found.append(F.linear(source[..., : self.width], weight))
                continue
            if weight.shape[1] == SIDES and around is None:
                padded = F.pad(by_module, (0, 0, 0, 0, 1, 1))
                around = torch.cat([padded[..., i : i + self.count, :, :] for i in range(SIDES)], -2).flatten(-2)
            read = around
            if read is None or weight.shape[1] == 1:
                read = by_module.reshape(*by_module.shape[:-2], -1)
            found.append(rows_product(read, weight.flatten(1)))
        return torch.cat(found, -1)

    def rows(self, source: Tensor, *names: str) -> Tensor:
        """The parts of these names, with their biases."""
        y = self.some(source, names)
        if self.bias is None:
            return y
        by_name = dict(zip(self.parts, self.bias.split(list(self.parts.values()))))
        return y + torch.cat([by_name[name] for name in names])


class SparseSource(nn.Module):
    """The convolutions of a layer read its output: the modules p of a token and of the two before it."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        if width % count:
            raise Mistake(f"--qkv-sparsity is {count}; it must divide the width of the layers, {width}")
        self.dense = Multiplicative(width, width, count)

    def forward(
        self, x: Tensor, state: RecentState | None = None, padding_mask: Tensor | None = None, reset_mask: Tensor | None = None
    ) -> tuple[Tensor, RecentState]:
        """Maps x (T,B,C) to [p_t, p_{t-1}, p_{t-2}] (T,B,3C) and the state after the last token."""
        return with_recent(self.dense(x), state, padding_mask, reset_mask)


def make_sparse(attention: MixerAttention | LinearAttention, count: int) -> None:
    """Replaces the input projections of an attention by convolutions, and takes its output projection away."""
    if isinstance(attention, LinearAttention):
        linear: Any = attention
        width, (key_size, _) = linear.q_proj.in_features, linear.sizes
        linear.source = SparseSource(width, count)
        linear.q_proj = Convolutions(width, count, {"q": key_size})
        linear.kv_proj = Convolutions(width, count, {"k": key_size, "v": width})
        linear.out_proj = nn.Identity()
        return
    mixer: Any = attention.mixer
    if not mixer.takes_source:
        raise Mistake(f"--qkv-sparsity is not for {type(mixer).__name__}, which makes queries, keys and values in other ways")
    parts = {part: rows.stop - rows.start for part, rows in mixer.projections()["in_proj"].items() if rows.stop > rows.start}
    attention.source = StatefulModule(SparseSource(mixer.embed_dim, count), RecentState, f"{attention.layer}.source")
    mixer.in_proj = Convolutions(mixer.embed_dim, count, parts, mixer.in_proj)
    if getattr(mixer, "value_width", mixer.embed_dim) != mixer.embed_dim:
        raise Mistake("--qkv-sparsity leaves out the output projection, which --expand-values needs; leave one of them out")
    if getattr(mixer, "out_proj", None) is not None:
        mixer.out_proj = nn.Identity()
