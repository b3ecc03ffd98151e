"""One long sequence on several workers: each holds a part of its tokens, in the order of their ranks.

A worker's part acts on the memory that it starts from as any part does (``parts``): by a transfer and by what the part adds. All
workers run their parts at the same time, from empty memories. They exchange transfers and additions, whose size does not depend on
the number of tokens, and each corrects its outputs for the memory that the workers before it leave.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from ...autograd import once_differentiable
from ...rules import Coefficients
from .parts import Form, chain, per_channel, run_from_identity


class Gather(torch.autograd.Function):
    """x of every worker, (S,...). The gradient of a worker's x is the sum of the gradients that all workers have for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        distributed.all_gather(parts, x, group=group)
        return torch.stack(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(grad, group=ctx.group)
        return grad[ctx.group.rank()], None


def by_worker(group: Any, *tensors: Tensor | None) -> list[Any]:
    """(B,...) -> (B,S,...) each, in one exchange."""
    present = [x for x in tensors if x is not None]
    gathered = Gather.apply(torch.cat([x.flatten() for x in present]), group)
    parts = iter(gathered.split([x.numel() for x in present], dim=1))
    return [None if x is None else next(parts).unflatten(1, x.shape).transpose(0, 1) for x in tensors]


def seen_from_start(
    form: Form, q: Tensor, k: Tensor, f: Tensor | None, e: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The queries seen from the start of the part (B,H,L,K), and the part's transfer: a matrix (B,H,K,K) with erase, else the
    key-side decay of all its tokens (B,H,1 or K), None for no decay."""
    if e is not None:
        return run_from_identity(form, q, k, f, e, dtype)
    if f is None:
        return q, None
    decay = per_channel(f).cumprod(2)
    return q.to(dtype) * decay, decay[:, :, -1]


def run_across(
    group: Any, form: Form, q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """The result of ``form(q, k, v, coefficients, memory)`` for the tokens of all workers: y at this worker's tokens, and the
    memory after the last worker's last token."""
    f, z, e, _ = coefficients
    empty = torch.zeros_like(memory)
    if e is not None and z is None:  # both runs in one: the identity is more columns, to which nothing is written
        identity = torch.eye(k.shape[-1], dtype=memory.dtype, device=k.device).expand(*memory.shape[:2], -1, -1)
        columns, widths = torch.cat([v, torch.zeros_like(k, dtype=v.dtype)], -1), [v.shape[-1], k.shape[-1]]
        y, ends = form(q, k, columns, coefficients, torch.cat([empty, identity], -1))
        (y, seen), (own, transfer) = y.split(widths, -1), ends.split(widths, -1)
    else:
        y, own = form(q, k, v, coefficients, empty)
        seen, transfer = seen_from_start(form, q.to(v.dtype), k.to(v.dtype), f, e, memory.dtype)  # normalisation makes v fp32
    value_decay = None if z is None else z.cumprod(2)
    end_decay = None if value_decay is None else value_decay[:, :, -1:]
    # Each worker computes the starts of all, so that all take part in the exchange of gradients.
    own, transfer, end_decay = by_worker(group, own, transfer, end_decay)
    starts, memory = chain(own, transfer, end_decay, memory)
    correction = seen.to(memory.dtype) @ starts[:, group.rank()]
    if value_decay is not None:
        correction = correction * value_decay
    return (y.to(memory.dtype) + correction).to(y.dtype), memory
