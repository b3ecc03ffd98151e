"""The sparse feed-forward layer of Jaszczur et al. 2021: of each N hidden units, a token uses one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import Mistake
from ...ops.sparse import feed_forward, few_rows

TEMPERATURE = 0.1  # of the Gumbel noise
HARD = 0.3  # probability that a training batch uses one unit of each block, and not their soft mixture


class SparseFeedForward(nn.Module):
    """y = W_2 f((W_1 x) * m) + b, with a mask m that is 1 at one unit of each block of N.

    A controller of low rank r gives each unit a logit, B A x + b_c. Evaluation takes the unit with the largest logit of each block,
    and reads the weights of these units only where it has few tokens. Training draws the unit with Gumbel noise, passes the
    gradient straight through to the softmax of the block, and uses that softmax as the mask in 7 of 10 batches. Both matrices have
    one row for each unit, so that the weights of a unit are contiguous.
    """

    def __init__(
        self, width: int, units: int, block: int, rank: int = 0, activation: Callable = F.relu, dropout: nn.Module | None = None
    ):
        super().__init__()
        if block < 2 or units % block:
            raise Mistake(
                f"--ffn-sparsity is {block}; it must be at least 2 and divide {units}, the width of the feed-forward layers"
            )
        if activation(torch.zeros((), device="cpu")) != 0:
            raise Mistake("--ffn-sparsity leaves units out, whose activation must be 0 at 0; choose another --activation-fn")
        self.block, self.activation, self.dropout = block, activation, nn.Identity() if dropout is None else dropout
        rank = rank or units // block
        self.controller_in = nn.Parameter(torch.empty(rank, width))  # A
        self.controller_out = nn.Parameter(torch.empty(units, rank))  # B
        self.controller_bias = nn.Parameter(torch.empty(units))
        self.weight_in = nn.Parameter(torch.empty(units, width))  # W_1
        self.weight_out = nn.Parameter(torch.empty(units, width))  # W_2^T
        self.bias = nn.Parameter(torch.empty(width))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws the weights from Glorot's distribution. Biases start near 0."""
        for weight in (self.controller_in, self.controller_out, self.weight_in, self.weight_out):
            nn.init.xavier_uniform_(weight)
        for bias in (self.controller_bias, self.bias):
            nn.init.normal_(bias, std=1e-6)

    def logits(self, x: Tensor) -> Tensor:
        """Maps x (...,C) to the controller's logits by block, (...,F/N,N)."""
        logits = F.linear(F.linear(x, self.controller_in), self.controller_out, self.controller_bias)
        return logits.unflatten(-1, (-1, self.block))

    def mask(self, x: Tensor) -> Tensor:
        """Maps x (...,C) to the mask of the units, (...,F)."""
        logits = self.logits(x)
        if not self.training:
            return one_of_each(logits).flatten(-2)
        log_soft = logits.float().log_softmax(-1) if logits.dtype != torch.float64 else logits.log_softmax(-1)
        soft = log_soft.exp().to(x.dtype)
        noise = -torch.empty_like(log_soft).exponential_().log()
        hard = one_of_each(log_soft.detach() + TEMPERATURE * noise).to(x.dtype)
        if torch.rand(()) < HARD:  # on the CPU, so that a GPU is not waited for
            soft = hard + soft - soft.detach()
        return soft.flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x (...,C) to y (...,C)."""
        if not self.training and not torch.is_grad_enabled() and few_rows(x.numel() // x.shape[-1], self.block):
            return self.of_few(x)
        hidden = self.dropout(self.activation(F.linear(x, self.weight_in) * self.mask(x)))
        return hidden @ self.weight_out + self.bias

    def of_few(self, x: Tensor) -> Tensor:
        """Maps x (...,C) to y (...,C), and reads the weights of the chosen units only."""
        rows = x.reshape(-1, x.shape[-1])
        controller = self.controller_in, self.controller_out, self.controller_bias
        y = feed_forward(rows, *controller, self.weight_in, self.weight_out, self.bias, self.block, self.activation)
        return y.view(x.shape)


def one_of_each(scores: Tensor) -> Tensor:
    """1 at the largest score of each row, and 0 elsewhere."""
    return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1)
