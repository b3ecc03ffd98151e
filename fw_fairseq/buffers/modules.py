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


def has_hooks(module: nn.Module) -> bool:
    """Whether someone wants to be told when a part of the module runs, or has put a function in its place."""
    return any(part._forward_hooks or part._forward_pre_hooks or hasattr(part, "_hf_hook") for part in module.modules())
