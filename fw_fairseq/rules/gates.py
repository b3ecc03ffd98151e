"""The gates of published layers: where they start, and how a layer makes one from the numbers that it has for it, x."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..autograd import unit

RATES = (1.0, 16.0)  # between them Mamba 2 and those after it draw exp(A)
ALL_RATES = (0.0, 16.0)  # and Gated DeltaNet
FASTEST = 80.0  # leaves 2e-35, which fp32 holds with all its digits


class Place(NamedTuple):
    """The numbers that a start is for: ``size`` of them over all heads, in layer number ``layer`` of ``layers``."""

    size: int
    heads: int
    layer: int = 0
    layers: int = 1

    @property
    def share(self) -> Tensor:
        """From 0 for the first of the numbers to 1 for the last."""
        return torch.arange(self.size) / max(self.size - 1, 1)

    @property
    def depth(self) -> float:
        """From 0 for the first layer to 1 for the last."""
        return self.layer / max(self.layers - 1, 1)


def time_steps(place: Place) -> Tensor:
    """Numbers whose softplus is from 0.001 to 0.1, uniform in its logarithm (Mamba 2)."""
    least, most = math.log(0.001), math.log(0.1)
    step = torch.empty(place.size).uniform_(least, most).exp()
    return step + (-torch.expm1(-step)).log()


def kept(place: Place) -> Tensor:
    """The logits of what Mamba 2 keeps at its start: exp(-rate step), with its rates and time steps."""
    rate, step = log_rates(place.size).exp(), F.softplus(time_steps(place))
    return -torch.expm1(rate * step).log()


def log_rates(count: int, rates: tuple[float, float] = RATES) -> Tensor:
    """The logs of ``count`` numbers that are uniform within ``rates``."""
    return torch.empty(count).uniform_(*rates).clamp(min=1e-6).log()


def retention(place: Place) -> Tensor:
    """1 - 2^(-5-h) for head number h (RetNet)."""
    return 1 - torch.exp2(-(torch.arange(place.size) + 5.0))


def bounds(place: Place) -> Tensor:
    """The logit of l / L for layer number l of L (HGRN 2)."""
    return torch.full((place.size,), place.layer / place.layers).logit(eps=1e-6)


def zigzag(place: Place) -> Tensor:
    """From -1 to 1 over the numbers of each head, steeper at both ends (RWKV 7)."""
    width = place.size // place.heads
    middle = (width - 1) / 2
    x = (torch.arange(place.size) % width - middle) / max(middle, 1)
    return x * x.abs()


def decay_6(place: Place) -> Tensor:
    """RWKV 6: the numbers x of its decay exp(-exp(x))."""
    return -6 + 5 * place.share ** (0.7 + 1.3 * place.depth)


def bonus_6(place: Place) -> Tensor:
    """RWKV 6: the weights of a token's own value."""
    return place.depth * (1 - place.share) + ((torch.arange(place.size) + 1) % 3 - 1) * 0.1


def decay_7(place: Place) -> Tensor:
    """RWKV 7: the logits s of its decay exp(-exp(-1/2) sigmoid(s))."""
    return -5.5 + 6 * place.share ** (1 + place.depth**0.3) + 2.5 * zigzag(place)


def removal_7(place: Place) -> Tensor:
    """RWKV 7: the logits of the share that is removed."""
    return -0.19 + 0.3 * zigzag(place) + 0.4 * (place.share - 0.5)


def key_7(place: Place) -> Tensor:
    """RWKV 7: the factors of a key that make the key of its removal."""
    return 0.71 - 0.1 * (place.share - 0.5)


def written_7(place: Place) -> Tensor:
    """RWKV 7: how much of a key's strength follows the share that is removed."""
    return torch.full((place.size,), 1.02)


def values_7(place: Place) -> Tensor:
    """RWKV 7: the logits of the share of the first layer's values."""
    return 0.73 - 0.4 * (place.share - 0.5)


def ones(place: Place) -> Tensor:
    """1."""
    return torch.ones(place.size)


class Form(NamedTuple):
    """The gate ``function(x)``. ``rate``: it is exp(-exp(A) function(x)), with a learnt A for each head; with ``exponent``, it is
    exp(A) function(x). ``bound``: it is b + (1 - b) function(x), with learnt bounds b."""

    function: Callable[[Tensor], Tensor]
    rate: bool = False
    exponent: bool = False
    bound: bool = False


def identity(x: Tensor) -> Tensor:
    """x itself."""
    return x


def root16(x: Tensor) -> Tensor:
    """sigmoid(x)^(1/16), near 0.96 at the start."""
    return (F.logsigmoid(x) / 16).exp()


def root8(x: Tensor) -> Tensor:
    """sigmoid(x)^(1/8), as gated slot attention has it."""
    return (F.logsigmoid(x) / 8).exp()


def left(x: Tensor) -> Tensor:
    """exp(-x), and never 0: where some channels of a token have gates of exactly 0, its chunk runs token by token."""
    return (-x.clamp(max=FASTEST)).exp()


def exponent(x: Tensor) -> Tensor:
    """exp(-exp(x)); held before the first exponential, which would overflow, and its gradient become NaN."""
    return (-x.clamp(max=math.log(FASTEST)).exp()).exp()


FORMS: dict[str, Form] = {
    "sigmoid": Form(torch.sigmoid),
    "root16": Form(root16),
    "exponent": Form(exponent),
    "softplus": Form(F.softplus),
    "unit": Form(unit),
    "identity": Form(identity),
    "kept": Form(identity, rate=True),
    "kept_softplus": Form(F.softplus, rate=True),
    "softplus_of_rate": Form(F.softplus, rate=True, exponent=True),
    "bounded": Form(torch.sigmoid, bound=True),
}
INNER: dict[str, Callable[[Tensor], Tensor]] = {"identity": identity, "tanh": torch.tanh}
