"""Modules without what modules do around their functions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def plain(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """The module's function without what modules do around it, which takes as long as the function for a few rows."""
    if type(module) is nn.Linear:
        return lambda x: F.linear(x, module.weight, module.bias)
    if type(module) is nn.LayerNorm:
        return lambda x: torch.layer_norm(x, module.normalized_shape, module.weight, module.bias, module.eps)
    return (lambda x: x) if type(module) is nn.Identity else module
