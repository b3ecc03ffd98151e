"""Fast Weight Memory (Schlag et al. 2021, sec. 6.1.2): a delta write, a memory kept within the unit ball, a layer-normalised read.

Each write is scaled back by the memory's norm, so tokens run one after the other. But they need only two things of the memory: the
reads of the chunk's keys, which each token changes by its inner products with the later keys, and the norm, whose square grows by
2 u_t . r_t + |u_t|^2 |k_t|^2 when u_t is written where r_t was read. So a chunk never computes the memory of each token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..autograd import once_differentiable

CHUNK = 32  # tokens; the fastest of 16, 32 and 64 on a CPU for values 20 to 200 wide


def fwm_step(memory: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The definition: q, k (B,H,K), v (B,H,V), beta (B,H), memory (B,H,K,V) -> y (B,H,V), the new memory."""
    recalled = torch.einsum("bhkv,bhk->bhv", memory, k)
    memory = memory + torch.einsum("bhk,bhv->bhkv", k, beta.unsqueeze(-1) * (v - recalled))
    norm = memory.flatten(-2).square().sum(-1).clamp(min=1.0).sqrt()  # relu(|W| - 1) + 1, smooth at W = 0
    memory = memory / norm[..., None, None]
    y = torch.einsum("bhkv,bhk->bhv", memory, q)
    return F.layer_norm(y, y.shape[-1:]), memory


def fwm_sequence(
    q: Tensor, k: Tensor, v: Tensor, memory: Tensor, padding_mask: Tensor | None, reset_mask: Tensor | None, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """``fwm_step`` over time, for q, k (B,H,T,K), v (B,H,T,V), beta (B,H,T), and masks (B,T). At padding q, k and v are 0."""
    sequences, tokens = q.shape[:2], q.shape[2]
    masks = (None if mask is None else mask[:, None].expand(*sequences, tokens) for mask in (padding_mask, reset_mask))
    padding, reset = (None if mask is None else mask.flatten(0, 1) for mask in masks)
    q, k, v, beta, memory = (x.flatten(0, 1) for x in (q, k, v, beta, memory))
    y, memory = in_chunks(lambda read, q: read(q), [q], k, v, beta, padding, reset, memory)
    return F.layer_norm(y, y.shape[-1:]).unflatten(0, sequences), memory.unflatten(0, sequences)


def in_chunks(
    answer: Callable[..., Tensor], asked: list[Tensor], k: Tensor, v: Tensor, beta: Tensor, padding: Any, reset: Any, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """The answers (N,T,V) and the last memory: ``answer(read, *asked)`` of each chunk, where ``read`` maps queries (N,C,K) to what
    they read, (N,C,V). k (N,T,K), v (N,T,V), beta, padding and reset (N,T), memory (N,K,V)."""
    outputs, chunks = [], -(-k.shape[1] // CHUNK)
    split = (chunks * [None] if x is None else x.split(CHUNK, 1) for x in (k, v, beta, padding, reset, *asked))
    for k_c, v_c, beta_c, padding_c, reset_c, *asked_c in zip(*split):  # a slice has a gradient of all T
        read, memory = chunk(k_c, v_c, beta_c, padding_c, reset_c, memory)
        outputs.append(answer(read, *asked_c))
    return torch.cat(outputs, dim=1), memory


def chunk(
    k: Tensor, v: Tensor, beta: Tensor, padding: Tensor | None, reset: Tensor | None, memory: Tensor
) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The function that reads with the queries of a chunk, and the memory after it: see ``in_chunks``."""
    if reset is not None:
        memory = memory.masked_fill(reset[:, :1, None], 0)
    norm = memory.square().sum((1, 2))
    written, scale = Writes.apply(k @ memory, k @ k.mT, v, beta, norm, padding, reset)
    logs = scale.log()
    since_start = logs.cumsum(1)  # (N,C): log of what is left of the memory after each token
    left = (since_start.unsqueeze(2) - (since_start - logs).unsqueeze(1)).tril().exp().tril()  # (N,C,C): of what each has written
    carried = since_start.exp()
    if reset is not None:
        text = reset.cumsum(1)
        left = left * (text.unsqueeze(2) == text.unsqueeze(1))
        carried = carried * (text == text[:, :1])
    before = memory

    def read(q: Tensor) -> Tensor:
        return carried.unsqueeze(2) * (q @ before) + ((q @ k.mT) * left) @ written

    return read, carried[:, -1:, None] * memory + (k * left[:, -1].unsqueeze(2)).mT @ written


class Writes(torch.autograd.Function):
    """The row that each token writes, (N,C,V), and the scale of the memory after its write, (N,C): one token after the other.

    recalled (N,C,V): what the keys read before the chunk; products (N,C,C) of the keys; norm (N): the memory's, squared;
    padding, reset (N,C). Time goes first inside. ``reads`` are what the keys of later tokens would read now.
    """

    @staticmethod
    def forward(
        ctx: Any, recalled: Tensor, products: Tensor, v: Tensor, beta: Tensor, norm: Tensor, padding: Any, reset: Any
    ) -> tuple[Tensor, Tensor]:
        reads, v = (x.transpose(0, 1).contiguous() for x in (recalled, v))
        products, beta = products.permute(1, 2, 0).unsqueeze(3), beta.mT.unsqueeze(2)
        padding, reset = (None if mask is None else mask.mT.unsqueeze(2) for mask in (padding, reset))
        norm = norm.unsqueeze(1)
        steps: list[Any] = []
        for t in range(len(v)):
            read = reads[0]
            written = beta[t] * (v[t] - read)
            grown = norm + (written * torch.addcmul(2 * read, written, products[t, t])).sum(1, keepdim=True)
            free = grown < 1 if padding is None else (grown < 1) | padding[t]  # of the ball
            scale = torch.where(free, 1.0, grown.rsqrt())
            norm, left = torch.where(free, grown, 1.0), scale
            if reset is not None and t + 1 < len(v):
                norm, left = norm.masked_fill(reset[t + 1], 0), scale.masked_fill(reset[t + 1], 0)
            reads = torch.addcmul(reads[1:], products[t + 1 :, t], written).mul_(left)
            steps.append((read, written, free, scale, left, reads))
        *made, later = zip(*steps)
        read, written, free, scale, left = map(torch.stack, made)
        ctx.save_for_backward(products, v, beta, reset, read, written, free, scale, left, *later)
        return written.transpose(0, 1), scale.squeeze(2).mT

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dwritten: Tensor, dscale: Tensor) -> tuple[Tensor | None, ...]:
        products, v, beta, reset, read, written, free, scale, left, *reads = ctx.saved_tensors
        dwritten = dwritten.transpose(0, 1).clone(memory_format=torch.contiguous_format)  # to be completed here
        dscale = dscale.mT.unsqueeze(2)
        slope = torch.where(free, 0.0, scale.pow(3) / -2)  # of the scale, by the norm that it is made from
        dproducts, dnorm = torch.zeros_like(products), torch.zeros_like(scale[0])
        dreads = read.new_zeros(0, *read.shape[1:])
        for t in reversed(range(len(v))):
            later = slice(t + 1, None)
            if reset is not None and t + 1 < len(v):
                dnorm = dnorm.masked_fill(reset[t + 1], 0)
            dscale_now = dscale[t] + (dreads * reads[t]).sum((0, 2)).unsqueeze(1) / scale[t]
            dgrown = torch.where(free[t], dnorm, slope[t] * dscale_now)
            dreads = dreads * left[t]
            dproducts[later, t] = (dreads * written[t]).sum(2, keepdim=True)
            dproducts[t, t] = dgrown * written[t].square().sum(1, keepdim=True)
            dwritten_now = torch.addcmul(dwritten[t], 2 * dgrown, torch.addcmul(read[t], products[t, t], written[t]))
            dwritten_now = dwritten_now + (products[later, t] * dreads).sum(0)
            dwritten[t] = dwritten_now
            dread = 2 * dgrown * written[t] - beta[t] * dwritten_now
            dreads, dnorm = torch.cat([dread.unsqueeze(0), dreads]), dgrown
        dv, dbeta = beta * dwritten, (dwritten * (v - read)).sum(2)
        drecalled, dv = dreads.transpose(0, 1), dv.transpose(0, 1)
        return drecalled, dproducts.squeeze(3).permute(2, 0, 1), dv, dbeta.mT, dnorm.squeeze(1), None, None
