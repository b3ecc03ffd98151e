"""The scans on a CPU as compiled loops, ``ops/native/scans.cpp``; without a compiler, PyTorch computes the same in blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..native import integers, loop, takes, threads

__all__ = ["pool", "pool_gradients", "sru", "takes"]


def pool(a: Tensor, x: Tensor, window: int, texts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the aggregate of the tokens that each one sees, as ``aggregates.aggregate``."""
    logs, means = torch.empty_like(a, memory_format=torch.contiguous_format), by_time(x)
    over_windows("pool", (a, dense(x), logs, means), texts, window, 1)
    return logs, means


def pool_gradients(
    a: Tensor, x: Tensor, logs: Tensor, means: Tensor, dlogs: Tensor, dmeans: Tensor, window: int, texts: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of a and x. Time is reversed: they are sums over the tokens that see each one."""
    da, dx = torch.empty_like(a, memory_format=torch.contiguous_format), by_time(x)
    over_windows("pool_gradients", (logs, dense(dmeans), dense(means), dlogs, a, dense(x), da, dx), texts, window, -1)
    return da, dx


def by_time(x: Tensor) -> Tensor:
    """Returns an empty (B,H,T,V) tensor that lies in memory as (T,B,H,V), which the layer reads next."""
    batch, heads, total, width = x.shape
    return x.new_empty(total, batch, heads, width).permute(1, 2, 0, 3)


def dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def over_windows(scan: str, parts: tuple[Tensor, ...], texts: Tensor | None, window: int, direction: int) -> None:
    """Calls a scan with tensors (B,H,T,...) and the texts (B,H,T), which are equal for all heads. direction: of time, 1 or -1."""
    (batch, heads, total, width), numbers = parts[1].shape, parts[1].numel()
    arguments: list[object] = []
    for part in parts:
        first = part.data_ptr() + (total - 1) * part.stride(2) * part.element_size() * (direction < 0)
        arguments += [first, integers(*part.stride()[:2], direction * part.stride(2))]
    if texts is None:
        arguments += [0, integers(0, 0)]
    else:
        first = texts.data_ptr() + (total - 1) * texts.stride(2) * texts.element_size() * (direction < 0)
        arguments += [first, integers(texts.stride(0), direction * texts.stride(2))]
    loop(scan, parts[0].dtype)(*arguments, integers(batch, heads, total, width, window, threads(numbers)))


def sru(
    product: Tensor,
    x: Tensor,
    v_forget: Tensor,
    v_reset: Tensor,
    first: Tensor,
    padded: Tensor | None,
    keep: Tensor | None,
    scale: float,
    gradients: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Returns h (T,B,D), c, f and r. With ``gradients``, c is (T+1,B,D), with the first, and f and r (T,B,D); else c is the last
    one (B,D), and f and r are None. padded, keep: (T,B,1) or None."""
    total, batch, width = x.shape
    product, x, v_forget, v_reset = (part.contiguous() for part in (product, x, v_forget, v_reset))
    h, (f, r) = torch.empty_like(x), [torch.empty_like(x) if gradients else None for _ in range(2)]
    c = x.new_empty(total + 1, batch, width) if gradients else first.clone(memory_format=torch.contiguous_format)
    if gradients:
        c[0] = first
    masks = [None if part is None else part.contiguous() for part in (padded, keep)]
    pointers = [0 if part is None else part.data_ptr() for part in (product, x, v_forget, v_reset, *masks, c, h, f, r)]
    loop("sru", x.dtype)(*pointers, scale, integers(total, batch, width, threads(product.numel())))
    return h, c, f, r
