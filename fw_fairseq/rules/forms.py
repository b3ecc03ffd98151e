"""How a layer makes a gate from the numbers that it has for it, x."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..autograd import unit

FASTEST = 80.0  # leaves 2e-35, which fp32 holds with all its digits


class Form(NamedTuple):
    """The gate ``function(x)``. ``rate``: it is exp(-exp(A) function(x)), with a learnt A for each head. ``bound``: it is
    b + (1 - b) function(x), with learnt bounds b."""

    function: Callable[[Tensor], Tensor]
    rate: bool = False
    bound: bool = False


def identity(x: Tensor) -> Tensor:
    return x


def root16(x: Tensor) -> Tensor:
    """sigmoid(x)^(1/16), near 0.96 at the start."""
    return (F.logsigmoid(x) / 16).exp()


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
    "bounded": Form(torch.sigmoid, bound=True),
}
INNER: dict[str, Callable[[Tensor], Tensor]] = {"identity": identity, "tanh": torch.tanh}
