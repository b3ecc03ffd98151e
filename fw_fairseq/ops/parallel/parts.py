"""Few sequences and many tokens: a sequence in parts that run side by side, as more rows of the batch.

A part acts on the memory M that it starts from in one linear way, whatever M is. With P its transfer matrix (K,K), Z the product of
its value-side decays, and M0 its memory when it starts from an empty one, it leaves P M diag(Z) + M0. Without erase P is diagonal,
the product of the key-side decays. With erase it is the final memory of a run that starts from the identity and writes nothing.

So all parts first run from empty memories, a scan over the parts finds the memory that each really starts from, and then they run
from those. Backwards it is the same: the gradient G of the memory that a part leaves becomes P^T G diag(Z) + G0 for the one that it
starts from, with G0 = sum_t r_t (Z_t dy_t)^T and r_t = P_t^T q_t the query as seen from the start of the part (with erase an output
of the run from the identity). A scan finds every part's G, and one backward pass of the form, from the true memories and with the
true gradients, gives the gradients of everything; none goes through the scans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...autograd import once_differentiable
from ...rules import Coefficients

Form = Callable[..., tuple[Tensor, Tensor]]


def run_parts(
    form: Form, count: int, q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """The result of ``form(q, k, v, coefficients, memory)``, computed in ``count`` parts or a few less."""
    tokens = q.shape[2]
    length = -(-tokens // count)
    count = -(-tokens // length)
    q, k, v, e, w = (split(x, count, length, 0) for x in (q, k, v, coefficients.e, coefficients.w))
    f, z = (split(x, count, length, 1) for x in (coefficients.f, coefficients.z))
    coefficients = Coefficients(f, z, e, w)
    with torch.no_grad():
        _, own = form(q, k, v, coefficients, memory.new_zeros(*q.shape[:2], *memory.shape[2:]))
        seen, transfer = (q, key_decay(f)) if e is None else run_from_identity(form, q, k, f, e, memory.dtype)
        transfer, value_decay = by_part(transfer, count), None if z is None else by_part(z.prod(2, keepdim=True), count)
        starts, _ = chain(by_part(own, count), transfer, value_decay, memory)
    starts = torch.cat([memory.unsqueeze(1), starts[:, 1:]], 1)  # no gradient but the first one's leaves the parts
    y, ends = form(q, k, v, coefficients, starts.flatten(0, 1))
    ends = by_part(ends, count)
    if torch.is_grad_enabled():
        y, ends = Adjoint.apply(y, ends, seen, f if e is None else None, z, transfer, value_decay)
    return join(y, count, tokens), ends[:, -1]


class Adjoint(torch.autograd.Function):
    """y and the memories after the parts as they are. Backwards, the gradient of each of those memories is made of the gradients of
    the later parts' outputs and of the last memory."""

    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        ends: Tensor,
        seen: Tensor,
        f: Tensor | None,
        z: Tensor | None,
        transfer: Tensor | None,
        value_decay: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(seen, f, z, transfer, value_decay)
        return y.view_as(y), ends.view_as(ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dends: Tensor) -> tuple[Tensor | None, ...]:
        seen, f, z, transfer, value_decay = ctx.saved_tensors
        dtype = dends.dtype
        seen, read = seen.to(dtype), dy.to(dtype)
        if f is not None:
            seen = seen * per_channel(f).cumprod(2)
        if z is not None:
            read = read * z.cumprod(2)
        own = by_part(seen.mT @ read, dends.shape[1]).flip(1)
        if transfer is not None:
            transfer = (transfer.mT if transfer.dim() == 5 else transfer).flip(1)
        starts, _ = chain(own, transfer, None if value_decay is None else value_decay.flip(1), dends[:, -1])
        return dy, starts.flip(1), None, None, None, None, None


def per_channel(f: Tensor) -> Tensor:
    """(B,H,T) or (B,H,T,K) -> (B,H,T,1 or K)."""
    return f if f.dim() == 4 else f.unsqueeze(-1)


def key_decay(f: Tensor | None) -> Tensor | None:
    """The key-side decay of all tokens, (N,H,1 or K); None for none."""
    return None if f is None else per_channel(f).prod(2)


def run_from_identity(form: Form, q: Tensor, k: Tensor, f: Tensor | None, e: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The queries seen from the start of their part (N,H,L,K), and the part's transfer (N,H,K,K)."""
    identity = torch.eye(q.shape[-1], dtype=dtype, device=q.device).expand(*q.shape[:2], -1, -1)
    return form(q, k, torch.zeros_like(q), Coefficients(f=f, e=e), identity)


def chain(own: Tensor, transfer: Tensor | None, value_decay: Tensor | None, memory: Tensor) -> tuple[Tensor, Tensor]:
    """The memories that S parts start from (B,S,H,K,V), and the memory after the last one.

    A part changes the memory that it starts from by transfer (B,S,H,K,K) or (B,S,H,1 or K) and by value_decay (B,S,H,1,V), and adds
    own (B,S,H,K,V). It takes log2(S) rounds; in the one of distance d, every part takes over what the d parts before it gathered.
    """
    matrices = transfer if transfer is not None and transfer.dim() == 5 else None
    decays = [] if transfer is None or matrices is not None else [transfer.unsqueeze(-1)]
    decays += [] if value_decay is None else [value_decay]
    memories = torch.cat([memory.unsqueeze(1), own], 1)
    distance = 1
    while distance < memories.shape[1]:
        past = memories[:, :-distance]
        if matrices is not None:
            past = matrices[:, distance - 1 :] @ past
            matrices = torch.cat([matrices[:, :distance], matrices[:, distance:] @ matrices[:, :-distance]], 1)
        for i, decay in enumerate(decays):
            past = past * decay[:, distance - 1 :]
            decays[i] = torch.cat([decay[:, :distance], decay[:, distance:] * decay[:, :-distance]], 1)
        memories = torch.cat([memories[:, :distance], memories[:, distance:] + past], 1)
        distance *= 2
    return memories[:, :-1], memories[:, -1]


def split(x: Any, count: int, length: int, neutral: float) -> Any:
    """(B,H,T,...) -> (B S,H,L,...), filled up with tokens that change nothing. A view for B = 1 and T = S L."""
    if x is None:
        return None
    if missing := count * length - x.shape[2]:
        x = F.pad(x, (*(0, 0) * (x.dim() - 3), 0, missing), value=neutral)
    return x.unflatten(2, (count, length)).movedim(2, 1).flatten(0, 1)


def by_part(x: Any, count: int) -> Any:
    """(N S,...) -> (N,S,...), for S parts."""
    return None if x is None else x.unflatten(0, (-1, count))


def join(y: Tensor, count: int, tokens: int) -> Tensor:
    """(B S,H,L,V) -> (B,H,T,V)."""
    return by_part(y, count).movedim(1, 2).flatten(2, 3)[:, :, :tokens]
