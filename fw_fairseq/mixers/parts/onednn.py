"""The product of a layer's inputs with its weights. On a CPU and in fp32 oneDNN computes it, which PyTorch uses for its LSTM but
not for ``F.linear``: on CPUs other than Intel's it can be twice as fast. Everywhere else, and for few rows, it is ``F.linear``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...autograd import once_differentiable

FEWEST = 32  # rows that oneDNN is used for


class Linear(nn.Linear):
    """A linear layer whose product oneDNN may compute."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (...,I), weight (O,I), bias (O) -> (...,O), as ``F.linear``."""
    return OneDnn.apply(x, weight, bias) if suits(x, weight) else F.linear(x, weight, bias)


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN computes this product."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or weight.dtype != torch.float32 or x.numel() < FEWEST * weight.shape[1]:
        return False
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    return torch.backends.mkldnn.is_available() and product() is not None


def product() -> Any:
    """oneDNN's product in PyTorch, which its compiler uses; None where this PyTorch has none."""
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def times(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product by oneDNN."""
    bias = None if bias is None else bias.contiguous()  # the product takes no account of its stride
    return product()(x, weight, bias, "none", [], "")


class OneDnn(torch.autograd.Function):
    """The product and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return times(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, dweight, dbias = (None,) * 3
        rows, inputs = dy.reshape(-1, dy.shape[-1]).contiguous(), x.reshape(-1, x.shape[-1])
        if ctx.needs_input_grad[0]:
            dx = times(rows, weight.t()).view(x.shape)
        if ctx.needs_input_grad[1]:
            dweight = times(inputs.t(), rows.t()).t()
        if ctx.needs_input_grad[2]:
            dbias = rows.sum(0)
        return dx, dweight, dbias
