"""The reads of heads before the output projection, and the tokens that a read is made of."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...feature_maps import wide
from ...ops.chunkwise.recall import until_end
from ...rules import Coefficients
from .gates import start_low_rank

EPS = 1e-5


class HeadNorm(nn.Module):
    """The reads of each head times ``scale``, divided by their root mean square, times learnt weights, which all heads share."""

    def __init__(self, width: int, scale: float = 1.0, eps: float = EPS) -> None:
        super().__init__()
        self.scale, self.eps = scale, eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, y: Tensor) -> Tensor:
        x = wide(y) if self.scale == 1 else wide(y) * self.scale
        return (x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight).to(y.dtype)


class ChannelNorm(HeadNorm):
    """The reads (B,H,T,V) times ``scale``, divided by the root mean square of all heads together, times weights of each channel.
    ``centred``: by the deviation of each head, after its mean is taken out, times weights and plus biases of each channel."""

    def __init__(self, heads: int, width: int, centred: bool, scale: float = 1.0, eps: float = EPS) -> None:
        super().__init__(heads * width, scale, eps)
        self.heads, self.bias = heads, nn.Parameter(torch.zeros(heads * width)) if centred else None

    def forward(self, y: Tensor) -> Tensor:
        x, weight = wide(y) if self.scale == 1 else wide(y) * self.scale, self.weight.view(self.heads, 1, -1)
        if self.bias is None:
            return (x * (x.square().mean((1, 3), keepdim=True) + self.eps).rsqrt() * weight).to(y.dtype)
        x = x - x.mean(-1, keepdim=True)
        x = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (x * weight + self.bias.view(self.heads, 1, -1)).to(y.dtype)


def make_norm(of: str, heads: int, width: int, scale: float, eps: float) -> HeadNorm:
    """The norm of --output-norm-of for heads of this width."""
    return HeadNorm(width, scale, eps) if of == "head" else ChannelNorm(heads, width, of == "centred_head", scale, eps)


class OutputGate(nn.Module):
    """The gate of the output, of ``width`` numbers, from ``size`` rows of the layer's projection: by the function of its form, with
    a map U from a low rank to the width, if ``rank`` is not 0. silu and sigmoid: of U x + b; of_sigmoid: U sigmoid(x)."""

    def __init__(self, form: str, rank: int, width: int) -> None:
        super().__init__()
        self.form, self.size, of_sigmoid = form, rank or width, form == "of_sigmoid"
        self.up = nn.Parameter(torch.empty(width, rank)) if rank else None
        self.bias = nn.Parameter(torch.zeros(width)) if rank and not of_sigmoid else None
        if self.up is not None:
            start_low_rank(self.up, of_sigmoid)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sigmoid(x) if self.form == "of_sigmoid" else x
        x = x if self.up is None else F.linear(x, self.up, self.bias)
        return x if self.form == "of_sigmoid" else torch.sigmoid(x) if self.form == "sigmoid" else F.silu(x)


def explained(read: Tensor, coefficients: Coefficients, writes: int) -> dict[str, Tensor]:
    """The weights (H,T) of the tokens in the read of the last one, and the strengths of their writes, from what the last query
    reads of values with one channel for each write (H,n T)."""
    write = coefficients.w
    if coefficients.z is not None:
        read = read * until_end(coefficients.z)[0].exp().mean(-1)
    write = torch.ones_like(read) if write is None else write[0]
    if write.dim() == 3:  # a strength per channel, which those values do not have
        write = write.mean(-1)
        read = read * write
    read, write = (part.unflatten(-1, (-1, writes)).sum(-1) for part in (read, write))
    return {"read": read, "write": write}
