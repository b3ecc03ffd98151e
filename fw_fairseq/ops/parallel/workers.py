"""One long sequence on several workers: each holds a part of its tokens, in the order of their ranks.

A worker's part acts on the memory that it starts from as a segment does (``segments``): a transfer and what the part adds. All
workers take their parts at once, from empty memories; they exchange transfers and additions, which do not grow with the tokens,
and each puts its outputs right for the memory that those before it leave.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable

from ...rules import Coefficients
from .. import normalisation
from .segments import chain, seen_from_start


class Gather(torch.autograd.Function):
    """x of every worker, (S,...). What a worker's x is worth is the sum of what it is worth on each of them."""

    @staticmethod
    def forward(ctx, x: Tensor, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        distributed.all_gather(parts, x, group=group)
        return torch.stack(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        grad = grad.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(grad, group=ctx.group)
        return grad[ctx.group.rank()], None


def by_worker(group, *tensors: Tensor | None) -> list[Tensor | None]:
    """(B,...) -> (B,S,...) each, in one exchange."""
    present = [x for x in tensors if x is not None]
    gathered = Gather.apply(torch.cat([x.flatten() for x in present]), group)
    parts = iter(gathered.split([x.numel() for x in present], dim=1))
    return [None if x is None else next(parts).unflatten(1, x.shape).transpose(0, 1) for x in tensors]


def run_across(group, form, q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients, memory: Tensor):
    """``form(q, k, v, coefficients, memory)`` of the tokens of all workers: this one's y, and the memory after the last one's."""
    f, z, e, _ = coefficients
    empty = torch.zeros_like(memory)
    if e is not None and z is None:  # both runs in one: the identity as more columns, which nothing is written to
        identity = torch.eye(k.shape[-1], dtype=memory.dtype, device=k.device).expand(*memory.shape[:2], -1, -1)
        columns, widths = torch.cat([v, torch.zeros_like(k, dtype=v.dtype)], -1), [v.shape[-1], k.shape[-1]]
        y, ends = form(q, k, columns, coefficients, torch.cat([empty, identity], -1))
        (y, seen), (own, transfer) = y.split(widths, -1), ends.split(widths, -1)
    else:
        y, own = form(q, k, v, coefficients, empty)
        seen, transfer = seen_from_start(form, q.to(v.dtype), k.to(v.dtype), f, e, memory.dtype)  # normalisation makes v fp32
    value_decay = None if z is None else z.cumprod(2)
    end_decay = None if z is None else value_decay[:, :, -1:]
    # Every worker's start is computed on each of them: so all take part in the exchange of gradients.
    starts, memory = chain(*by_worker(group, own, transfer, end_decay), memory)
    correction = seen.to(memory.dtype) @ starts[:, group.rank()]
    if value_decay is not None:
        correction = correction * value_decay
    return (y.to(memory.dtype) + correction).to(y.dtype), memory


def sum_keys_across(group, q: Tensor, k: Tensor, normaliser: Tensor, reset_mask: Tensor | None):
    """``normalisation.sum_keys`` of the tokens of all workers: sums of this one's, and the last n after the last one's."""
    if reset_mask is None:
        own = k.sum(2, dtype=normaliser.dtype)
    else:
        *_, own = normalisation.sum_keys(q, k, torch.zeros_like(normaliser), reset_mask)
    kept = None if reset_mask is None else (~reset_mask.any(1)).to(own.dtype)[:, None, None].expand(*own.shape[:2], 1)
    own, kept = by_worker(group, own.unsqueeze(-1), kept)
    starts, end = chain(own, kept, None, normaliser.unsqueeze(-1))
    read, recalled, _ = normalisation.sum_keys(q, k, starts[:, group.rank()].squeeze(-1), reset_mask)
    return read, recalled, end.squeeze(-1)


def largest_scales(group, key_log_scale: Tensor, log_scale: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """What ``normalisation.running_scale`` starts from on this worker, (B,H), and where it ends on the last one."""
    own = normalisation.running_scale(key_log_scale, left, torch.full_like(log_scale, -torch.inf))[..., -1]
    owns, lefts = by_worker(group, own, left.sum(-1))
    scales = [log_scale.double()]
    for worker in range(group.size()):
        scales.append(torch.maximum(scales[-1] + lefts[:, worker], owns[:, worker]))
    return scales[group.rank()].to(log_scale.dtype), scales[-1].to(log_scale.dtype)
