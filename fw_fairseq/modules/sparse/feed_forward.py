"""The sparse feed-forward layer of Jaszczur et al. 2021, and the recurrent units beside it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...errors import Mistake
from ...mixers.sru import SruState
from ...ops.scans.sru import sru
from .gathered import feed_forward, few_rows

TEMPERATURE = 0.1  # of the Gumbel noise
HIGHWAY = math.sqrt(3)  # of the recurrent units
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
    ) -> None:
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


class RecurrentUnits(nn.Module):
    """Few simple recurrent units, which order the tokens of a model without positions: W_o SRU(W_i LN(x)), with gates of the token
    alone: f_t = sigmoid(F_t), r_t = sigmoid(R_t), c_t = f_t c_{t-1} + (1 - f_t) u_t, h_t = r_t c_t + (1 - r_t) sqrt(3) x_t."""

    def __init__(self, width: int, units: int) -> None:
        super().__init__()
        self.units = units
        self.norm = nn.LayerNorm(width)
        self.down, self.gates, self.up = nn.Linear(width, units), nn.Linear(units, 3 * units), nn.Linear(units, width)
        for linear in (self.down, self.gates, self.up):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(
        self, x: Tensor, state: SruState | None = None, padding_mask: Tensor | None = None, reset_mask: Tensor | None = None
    ) -> tuple[Tensor, SruState]:
        """Maps x (T,B,C) to (T,B,C) and the state after the last token."""
        inner = self.down(self.norm(x))
        alone = inner.new_zeros(self.units)
        cell = None if state is None else state.cell
        h, cell = sru(self.gates(inner), inner, alone, alone, cell, padding_mask, reset_mask, HIGHWAY)
        return self.up(h), SruState(cell)

    def step(self, x: Tensor, cell: Tensor) -> Tensor:
        """Maps one token x (R,C) to (R,C), and changes ``cell`` (R,units) in place."""
        inner = self.down(self.norm(x))
        u, forget, highway = self.gates(inner).to(cell.dtype).chunk(3, -1)
        torch.lerp(u, cell, forget.sigmoid(), out=cell)
        return self.up(torch.lerp(inner.to(cell.dtype) * HIGHWAY, cell, highway.sigmoid()).to(x.dtype))
