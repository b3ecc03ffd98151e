"""Parts of a layer that see a few tokens back: a short convolution, and mixtures of a token and the one before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import Mistake
from ...ops.onnx import TRACE, onnx_convolution

SHIFT_POWERS = {"q": 0.2, "k": 0.7, "v": 0.7, "output": 0.2}  # of RWKV 7; gates have the next
GATE_POWER = 0.9
SAME_MIXTURE = {"mixing": "v"}  # a part that reads the mixture of another
DEPENDENT_POWERS = {"q": 0.5, "output": 0.5}  # of RWKV 6; all others have 1
LEAST_OF_VALUES = 0.3  # in RWKV 6, less of the token before goes into the values of higher layers


class EarlierTokens:
    """The ``before`` tokens before each token of x (T,B,C), in the same text; zeros where it has fewer. ``recent`` (B,before,C) are
    those before the first. Padding, (B,T), is not there, and a reset, (B,T), begins a text.

    Inside, the tokens of a row that are no padding come first (``order``), and ``text`` counts the resets up to each token.
    """

    def __init__(
        self, x: Tensor, recent: Tensor | None, before: int, padding_mask: Tensor | None = None, reset_mask: Tensor | None = None
    ) -> None:
        needed = (x.shape[1], before, x.shape[2])
        if recent is not None and recent.shape != needed:
            raise Mistake(f"state has earlier tokens of shape {tuple(recent.shape)}; for this x they must be {needed}")
        given = x.new_zeros(needed) if recent is None else recent.to(x.dtype)
        self.before = before
        self.count: Any = None
        self.order: Any = None
        text = None if reset_mask is None else reset_mask.cumsum(1).mT  # (T,B)
        self.last_text = None if text is None else text[-1]
        if padding_mask is not None:
            self.order = padding_mask.mT.to(torch.uint8).argsort(dim=0, stable=True)
            self.count = (~padding_mask).sum(1)
            x = x.take_along_dim(self.order.unsqueeze(-1), 0)
            text = None if text is None else text.take_along_dim(self.order, 0)
        self.seen = torch.cat([given.transpose(0, 1), x])
        self.text = None if text is None else F.pad(text, (0, 0, before, 0))

    def back(self, tokens: int) -> Tensor:
        """The token so many tokens before each token, (T,B,C), itself for 0."""
        start, stop = self.before - tokens, self.seen.shape[0] - tokens
        x = self.seen[start:stop]
        if self.text is None or not tokens:
            return x
        return x.masked_fill((self.text[start:stop] != self.text[self.before :]).unsqueeze(-1), 0)

    def in_place(self, y: Tensor) -> Tensor:
        """(T,B,X) in the order of ``back`` in the order of x."""
        return y if self.order is None else torch.zeros_like(y).scatter(0, self.order.unsqueeze(-1).expand_as(y), y)

    def recent(self) -> Tensor:
        """The last tokens of the last text, (B,before,C)."""
        x, text, last_text = self.seen, self.text, self.last_text
        if self.order is None:
            x, text = x[x.shape[0] - self.before :], None if text is None else text[text.shape[0] - self.before :]
        else:
            last = self.count + torch.arange(self.before, device=x.device).unsqueeze(1)
            x, text = x.take_along_dim(last.unsqueeze(-1), 0), None if text is None else text.take_along_dim(last, 0)
        if text is not None and last_text is not None:
            x = x.masked_fill(torch.ne(text, last_text).unsqueeze(-1), 0)
        return x.transpose(0, 1).contiguous()


class ShortConvolution(nn.Module):
    """silu(sum_j w_j * x_{t-j}) over the last ``taps`` tokens of the same text, w_j one number per channel; with ``bias``, one
    more number is added to the sum."""

    def __init__(self, channels: int, taps: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(taps, channels).uniform_(-(taps**-0.5), taps**-0.5))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-(taps**-0.5), taps**-0.5)) if bias else None

    def forward(self, x: Tensor, recent: Tensor | None, *masks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Maps x (T,B,C), what came before it, and the masks of padding and resets, to y (T,B,C) and the last inputs."""
        if TRACE.on and not any(mask is not None for mask in masks):
            return onnx_convolution(x, recent, self.weight, self.bias)
        earlier = EarlierTokens(x, recent, len(self.weight) - 1, *masks)
        y = earlier.back(0) * self.weight[0]
        y = y if self.bias is None else y + self.bias
        for tokens in range(1, len(self.weight)):
            y = torch.addcmul(y, earlier.back(tokens), self.weight[tokens])
        return F.silu(earlier.in_place(y)), earlier.recent()


class TokenShift(nn.Module):
    """Gives each part of a projection its own mixture of a token and the one before it, x_t + mu * (x_{t-1} - x_t)."""

    def __init__(self, sizes: dict[str, int], width: int, layer: int, layers: int) -> None:
        super().__init__()
        names = [name for name, size in sizes.items() if size]
        self.sizes, self.mixtures = [sizes[name] for name in names], [name for name in names if name not in SAME_MIXTURE]
        self.mixture_of = [self.mixtures.index(SAME_MIXTURE.get(name, name)) for name in names]
        channels, powers = torch.arange(width) / width, [SHIFT_POWERS.get(name, GATE_POWER) for name in self.mixtures]
        self.weight = nn.Parameter(torch.stack([1 - channels ** (power * (1 - layer / layers)) for power in powers]))

    def forward(self, x: Tensor, projection: Tensor, previous: Tensor | None, *masks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Maps x (T,B,C) and the weights of the projection (rows,C) to what the rows' own mixtures add, (T,B,rows), and the last
        token."""
        earlier = EarlierTokens(x, previous, 1, *masks)
        return self.added(x, earlier.in_place(earlier.back(1)) - x, projection), earlier.recent()

    def added(self, x: Tensor, change: Tensor, projection: Tensor) -> Tensor:
        """Returns what the mixtures add, for the change from x (T,B,C) to the token before it."""
        shares = [self.weight[i].expand(size, -1) for i, size in zip(self.mixture_of, self.sizes)]
        return F.linear(change, projection * torch.cat(shares))


class DependentShift(TokenShift):
    """A ``TokenShift`` whose mixtures depend on the token (RWKV 6): mu_i + A_i tanh(B_i (x_t + nu * (x_{t-1} - x_t))) for part i,
    with A_i (C,rank) and B_i (rank,C). B starts at 0."""

    def __init__(self, sizes: dict[str, int], width: int, layer: int, layers: int, rank: int) -> None:
        super().__init__(sizes, width, layer, layers)
        rest, parts = (torch.arange(width) / width) ** (1 - layer / layers), len(self.mixtures)
        starts = torch.stack([1 - rest ** DEPENDENT_POWERS.get(name, 1.0) for name in self.mixtures])
        starts[self.mixtures.index("v")] -= LEAST_OF_VALUES * layer / max(layers - 1, 1)
        self.weight = nn.Parameter(starts)
        self.both = nn.Parameter(1 - rest)
        self.down = nn.Parameter(torch.zeros(parts * rank, width))
        self.up = nn.Parameter(torch.empty(parts, rank, width).uniform_(-0.01, 0.01))

    def added(self, x: Tensor, change: Tensor, projection: Tensor) -> Tensor:
        low = torch.tanh(F.linear(torch.addcmul(x, change, self.both), self.down)).unflatten(-1, self.up.shape[:2])
        shares = [mu + low[..., i, :] @ self.up[i] for i, mu in enumerate(self.weight)]
        rows = zip(self.mixture_of, projection.split(self.sizes))
        return torch.cat([F.linear(change * shares[i], weight) for i, weight in rows], -1)


def make_shift(config: Any, sizes: dict[str, int], width: int, layer: int, layers: int) -> TokenShift | None:
    """The token shift that the options ask for, for the parts of a projection."""
    if not config.token_shift:
        return None
    rank = config.token_shift_rank
    return DependentShift(sizes, width, layer, layers, rank) if rank else TokenShift(sizes, width, layer, layers)
