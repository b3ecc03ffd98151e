"""Aggregates: several tokens that act as one. Its score is the log of their summed weights, its value is their mean.

Two aggregates merge by a two-way softmax, which is associative and cannot overflow, so chunks are aggregated as tokens are. A
window is the end of one chunk, the whole chunks after it, and the beginning of another. Ends and beginnings of all chunks are
matrix products, and the whole chunks between them are again a window, of fewer tokens. Nothing is subtracted or cancels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...autograd import as_written, once_differentiable
from . import compiled
from .pooling_kernel import pool_cuda_form

CHUNK, DENSE = 16, 128  # the most tokens in one product: for a long sequence, for a short one
LOG2_E = 1 / math.log(2)
Aggregate = tuple[Tensor, Tensor]  # scores and values
NOTHING = -1e30  # the score of no token at all; finite, so that differences of two of them are numbers


def pooled(a: Tensor, x: Tensor, window: int, texts: Tensor | None, kernels: bool) -> tuple[Tensor, Tensor]:
    """Returns the logs of the summed weights (B,H,T) and the means of what each token sees. texts: (B,T)."""
    window = window if window < a.shape[2] else 0
    if kernels:
        return pool_cuda_form(a, x, window, texts)
    return Pool.apply(a, x, window, None if texts is None else texts[:, None].expand(*a.shape[:2], -1))


class Pool(torch.autograd.Function):
    """Maps a (B,H,T) and x (B,H,T,V) to the logs of the summed weights (B,H,T) and the means (B,H,T,V).

    The gradient of x_l is exp(a_l) sum_t exp(-L_t) dg_t over the t that see l, where L_t is the log of t's summed weights.
    These are again sums over windows, in reversed time and with scores -L_t. The weight that a_l takes from the other tokens
    is one more channel of these sums.
    """

    @staticmethod
    @as_written
    def forward(ctx: Any, a: Tensor, x: Tensor, window: int, texts: Tensor | None) -> tuple[Tensor, Tensor]:
        log_weights, means = aggregate(a, x, window, texts)
        ctx.window = window
        ctx.save_for_backward(a, x, texts, log_weights, means)
        return log_weights, means

    @staticmethod
    @once_differentiable
    @as_written
    def backward(ctx: Any, dlog_weights: Tensor, dmeans: Tensor) -> tuple[Tensor | None, ...]:
        a, x, texts, log_weights, means = ctx.saved_tensors
        if compiled.takes(a, x, dlog_weights, dmeans):
            return *compiled.pool_gradients(a, x, log_weights, means, dlog_weights, dmeans, ctx.window, texts), None, None
        shared = (dmeans * means).sum(-1, keepdim=True) - dlog_weights[..., None]
        scores = torch.where(log_weights > NOTHING / 2, -log_weights, NOTHING)  # tokens that saw nothing pass no gradient back
        back = scores.flip(2), torch.cat([dmeans, shared], -1).flip(2), None if texts is None else texts.flip(2)
        log_sums, sums = (part.flip(2) for part in aggregate(*back[:2], ctx.window, back[2]))
        sums.mul_((a + log_sums).exp()[..., None])
        dx = sums[..., :-1]
        return (x * dx).sum(-1) - sums[..., -1], dx, None, None


def aggregate(a: Tensor, x: Tensor, window: int, texts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the aggregate of the tokens that each one sees: a window, or all of the past for window 0."""
    if compiled.takes(a, x):
        return compiled.pool(a, x, window, texts)
    return windowed(a, x, window, texts) if 0 < window < a.shape[-1] else prefix(a, x, texts)


def mean(a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Maps (...,T) and (...,T,V) to the log of the summed weights (...) and the mean (...,V)."""
    log_weight = a.logsumexp(-1)
    return log_weight, ((a - log_weight[..., None]).exp()[..., None, :] @ x).squeeze(-2)


def merge(a: Tensor, x: Tensor, b: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the aggregate of two aggregates, with log weights a, b (...) and means x, y (...,V)."""
    return torch.logaddexp(a, b), torch.lerp(y, x, torch.sigmoid(a - b)[..., None])


def prefix(a: Tensor, x: Tensor, texts: Any = None) -> tuple[Tensor, Tensor]:
    """Returns the aggregate (...,T), (...,T,V) of the tokens up to each one, in its own text; ``texts`` (...,T) increases."""
    total = a.shape[-1]
    if total <= CHUNK:
        return masked(a, x, causal(total, a.device), texts, texts)
    a, x, texts = blocks(a, x, texts, CHUNK)
    a, x = masked(a, x, causal(CHUNK, a.device), texts, texts)
    ends: Any = None if texts is None else texts[..., -1]
    earlier, means = prefix(a[..., -1], x[..., -1, :], ends)
    earlier, means = F.pad(earlier[..., :-1], (1, 0), value=NOTHING), F.pad(means[..., :-1, :], (0, 0, 1, 0))
    earlier = earlier[..., None].expand(a.shape)
    if texts is not None:
        earlier = earlier.masked_fill(F.pad(ends[..., :-1], (1, 0), value=-1)[..., None] != texts, NOTHING)
    a, x = merge(earlier, means[..., None, :].expand(x.shape), a, x)
    return a.flatten(-2)[..., :total], x.flatten(-3, -2)[..., :total, :]


def windowed(a: Tensor, x: Tensor, window: int, texts: Any) -> tuple[Tensor, Tensor]:
    """Returns aggregates as ``prefix`` does, for the last ``window`` tokens. Each merges three: one of the chunk where the window
    begins, one of all chunks between, and one of the token's own chunk."""
    total = a.shape[-1]
    if total <= DENSE:
        return masked(a, x, band(total, window, a.device), texts, texts)
    a, x, texts = blocks(a, x, texts, CHUNK)
    if window <= CHUNK:
        scores: Any
        values: Any
        keys: Any
        scores, values, keys = zip(earlier(1, a, x, texts), (a, x, texts))
        keys = None if texts is None else torch.cat(keys, -1)
        seen = band(2 * CHUNK, window, a.device)[CHUNK:]
        a, x = masked(torch.cat(scores, -1), torch.cat(values, -2), seen, texts, keys)
    else:
        a, x = over_chunks(a, x, window, texts)
    return a.flatten(-2)[..., :total], x.flatten(-3, -2)[..., :total, :]


def over_chunks(a: Tensor, x: Tensor, window: int, texts: Any) -> tuple[Tensor, Tensor]:
    """Returns the aggregates of chunks (...,N,C), (...,N,C,V) for windows that begin in an earlier chunk than they end in."""
    ends: Any = None if texts is None else texts[..., -1]
    of_ends: Any = None if ends is None else ends[..., None].expand_as(texts)
    own, sums, means = weighted(a, x, causal(CHUNK, a.device), texts, texts)
    rest, rest_sums, olds = weighted(a, x, causal(CHUNK, a.device).t(), of_ends, texts)
    before, (between, offset) = window - 1, divmod(window - 1, CHUNK)  # tokens below the offset see one chunk more between
    whole = own[..., -1] + sums[..., -1].log(), means[..., -1, :] / sums[..., -1, None]
    more, fewer = between_chunks(*whole, between, ends)
    middle = torch.cat([part[0][..., None].expand(*part[0].shape, n) for part, n in ((more, offset), (fewer, CHUNK - offset))], -1)
    rest, rest_sums = later(rest, before, NOTHING), later(rest_sums, before, 0)
    if ends is not None:
        middle = middle.masked_fill(F.pad(ends[..., :-1], (1, 0), value=-1)[..., None] != texts, NOTHING)
        rest = rest.masked_fill(later(of_ends, before, -1) != texts, NOTHING)
    top = torch.maximum(torch.maximum(own, rest), middle)
    own, rest, middle = (exp(part - top) for part in (own, rest, middle))
    total = own * sums + rest * rest_sums + middle
    share, share_rest, share_middle = ((part / total)[..., None] for part in (own, rest, middle))
    means.mul_(share)
    means[..., :offset, :].addcmul_(share_middle[..., :offset, :], more[1][..., None, :])
    means[..., offset:, :].addcmul_(share_middle[..., offset:, :], fewer[1][..., None, :])
    flat, share_rest = means.flatten(-3, -2), share_rest.flatten(-3, -2)
    flat[..., before:, :].addcmul_(share_rest[..., before:, :], olds.flatten(-3, -2)[..., :-before, :])
    return top + total.log(), means


def later(x: Tensor, count: int, fill: float) -> Tensor:
    """Moves numbers of tokens in chunks (...,N,C), each to the token ``count`` later."""
    return F.pad(x.flatten(-2)[..., :-count], (count, 0), value=fill).view(x.shape)


def between_chunks(a: Tensor, x: Tensor, count: int, ends: Any) -> tuple[Aggregate, Aggregate]:
    """Maps chunks (...,N), (...,N,V), each one token, to the aggregates of the ``count`` before each, and of one less."""
    far, values, far_ends = earlier(count, a, x, ends)
    if ends is not None:
        far = far.masked_fill(far_ends != F.pad(ends[..., :-1], (1, 0), value=-1), NOTHING)
    if count == 1:
        return (far, values), (torch.full_like(far, NOTHING), torch.zeros_like(values))
    near = earlier(1, *aggregate(a, x, count - 1, ends), None)[:2]
    return merge(*near, far, values), near


def earlier(count: int, a: Tensor, x: Tensor, texts: Any) -> tuple[Tensor, Tensor, Any]:
    """Replaces each block (B,H,blocks,...) by the block ``count`` before it, or by nothing where there is none."""
    parts: Any = tuple(
        None if part is None else torch.cat([torch.full_like(part[:, :, :count], fill), part[:, :, :-count]], 2)
        for part, fill in ((a, NOTHING), (x, 0), (texts, -1))
    )
    return parts


def blocks(a: Tensor, x: Tensor, texts: Any, size: int) -> tuple[Tensor, Tensor, Any]:
    """Splits (...,T), (...,T,V) and texts into blocks of ``size``; the last block is filled up with nothing."""
    count = -(-a.shape[-1] // size)
    fill = count * size - a.shape[-1]
    a, x = F.pad(a, (0, fill), value=NOTHING), F.pad(x, (0, 0, 0, fill))
    if texts is not None:
        texts = torch.cat([texts, texts[..., -1:].expand(*texts.shape[:-1], fill)], -1).unflatten(-1, (count, size))
    return a.unflatten(-1, (count, size)), x.unflatten(-2, (count, size)), texts


def masked(a: Tensor, x: Tensor, seen: Tensor, queries: Tensor | None, keys: Tensor | None) -> tuple[Tensor, Tensor]:
    """Maps a (...,S), x (...,S,V), seen (T,S) to (...,T), (...,T,V): the aggregate of the tokens that each sees in its text."""
    top, sums, values = weighted(a, x, seen, queries, keys)
    return top + sums.log(), values.div_(sums[..., None])


def weighted(a: Tensor, x: Tensor, seen: Tensor, queries: Any, keys: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the largest scores (...,T), and relative to them the sums of weights (...,T) and of weighted x (...,T,V)."""
    scores = a[..., None, :] + torch.zeros_like(seen, dtype=a.dtype).masked_fill_(~seen, float("-inf"))
    if queries is not None:
        scores.masked_fill_(queries[..., :, None] != keys[..., None, :], float("-inf"))
    top = scores.amax(-1, keepdim=True)
    weights = exp(scores.sub_(top))
    return top.squeeze(-1), weights.sum(-1), weights @ x


def exp(x: Tensor) -> Tensor:
    """Computes the exponential of x in place; x is at most 0. exp2 is many times as fast as exp, most of all where the result
    is 0."""
    return x.mul_(LOG2_E).exp2_()


def causal(size: int, device: torch.device) -> Tensor:
    """Returns a mask (size, size) in which each token sees itself and all before it."""
    return torch.ones(size, size, dtype=torch.bool, device=device).tril()


def band(size: int, window: int, device: torch.device) -> Tensor:
    """Returns a mask (size, size) in which each token sees itself and the ``window - 1`` before it."""
    return torch.ones(size, size, dtype=torch.bool, device=device).tril().triu(1 - window)
