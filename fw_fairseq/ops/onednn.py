"""The product of a layer's inputs with its weights. On a CPU and in fp32 oneDNN computes it, which PyTorch uses for its LSTM but
not for ``F.linear``: on CPUs other than Intel's it can be twice as fast. Everywhere else, and for few rows, it is ``F.linear``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..autograd import once_differentiable

FEWEST = 32  # rows that oneDNN is used for


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (...,I), weight (O,I), bias (O) -> (...,O), as ``F.linear``."""
    return OneDnn.apply(x, weight, bias) if suits(x, weight) else F.linear(x, weight, bias)


def suits(x: Tensor, weight: Tensor) -> bool:
    if x.device.type != "cpu" or x.dtype != torch.float32 or weight.dtype != torch.float32 or x.numel() < FEWEST * weight.shape[1]:
        return False
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    return torch.backends.mkldnn.is_available() and product() is not None


def product():
    """oneDNN's product in PyTorch, which its compiler uses; None where this PyTorch has none."""
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def times(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    bias = None if bias is None else bias.contiguous()  # the product takes no account of its stride
    return product()(x, weight, bias, "none", [], "")


class OneDnn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return times(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
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
