"""Few sequences and many tokens: a sequence in parts that run side by side, as more rows of the batch.

A part acts on the memory M that it starts from in one linear way, whatever M is. With P its transfer matrix (K,K), Z the product of
its value-side decays, and y0, M0 its outputs and memory when it starts from an empty one,

    y_t = y0_t + Z_t * (M^T r_t),      the memory after it = P M diag(Z) + M0,

where r_t = P_t^T q_t is the query as seen from the start of the part. Without erase P is diagonal, the product of the key-side
decays. With erase, r and P are the outputs and the final memory of a run that starts from the identity and writes nothing.
So all parts run from empty memories, a short loop over the parts finds the memory that each really starts from, and that corrects
their outputs. Everything is differentiable operations and the form that is given, so gradients follow.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...rules import Coefficients

SHORTEST = 256  # tokens of a part; with shorter ones the loop over parts leaves the device idle
FEWEST = 4  # correcting the outputs costs about one or two more runs, so fewer parts gain nothing


def choose_parts(sequences: int, tokens: int, processors: int) -> int:
    """The number of parts: enough that every processor of the device has one; 1 where that does not pay."""
    count = min(processors // sequences, tokens // SHORTEST) if sequences else 1
    return count if count >= FEWEST else 1


def run_parts(
    form, count: int, q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """The result of ``form(q, k, v, coefficients, memory)``, computed in ``count`` parts or a few less."""
    tokens, dtype = q.shape[2], memory.dtype
    length = -(-tokens // count)
    count = -(-tokens // length)
    q, k, v, e, w = (split(x, count, length, 0) for x in (q, k, v, coefficients.e, coefficients.w))
    f, z = (split(x, count, length, 1) for x in (coefficients.f, coefficients.z))
    empty = memory.new_zeros(*q.shape[:2], *memory.shape[2:])
    y, own = form(q, k, v, Coefficients(f, z, e, w), empty)
    seen, transfer = seen_from_start(form, q, k, f, e, dtype)
    value_decay = None if z is None else z.cumprod(2)

    starts, memory = chain(by_part(own, count), by_part(transfer, count), by_part(value_decay, count), memory)
    correction = seen.to(dtype) @ starts.flatten(0, 1)
    if value_decay is not None:
        correction = correction * value_decay
    return join((y.to(dtype) + correction).to(y.dtype), count, tokens), memory


def seen_from_start(form, q: Tensor, k: Tensor, f: Tensor | None, e: Tensor | None, dtype) -> tuple[Tensor, Tensor | None]:
    """The queries seen from the start of their part (N,H,L,K), and the part's transfer: a matrix (N,H,K,K) with erase, else the
    key-side decay of all its tokens (N,H,1 or K), None for no decay."""
    if e is not None:
        identity = torch.eye(q.shape[-1], dtype=dtype, device=q.device).expand(*q.shape[:2], -1, -1)
        return form(q, k, torch.zeros_like(q), Coefficients(f=f, e=e), identity)
    if f is None:
        return q, None
    decay = (f if f.dim() == 4 else f.unsqueeze(-1)).cumprod(2)
    return q.to(dtype) * decay, decay[:, :, -1]


def chain(own: Tensor, transfer: Tensor | None, value_decay: Tensor | None, memory: Tensor) -> tuple[Tensor, Tensor]:
    """The memories that S parts start from (B,S,H,K,V), and the memory after the last one."""
    starts = []
    for s in range(own.shape[1]):
        starts.append(memory)
        if transfer is not None:
            memory = transfer[:, s] @ memory if transfer.dim() == 5 else transfer[:, s].unsqueeze(-1) * memory
        if value_decay is not None:
            memory = memory * value_decay[:, s, :, -1:]
        memory = memory + own[:, s]
    return torch.stack(starts, 1), memory


def split(x: Tensor | None, count: int, length: int, neutral: float) -> Tensor | None:
    """(B,H,T,...) -> (B S,H,L,...), filled up with tokens that change nothing. A view for B = 1 and T = S L."""
    if x is None:
        return None
    if missing := count * length - x.shape[2]:
        x = F.pad(x, (*(0, 0) * (x.dim() - 3), 0, missing), value=neutral)
    return x.unflatten(2, (count, length)).movedim(2, 1).flatten(0, 1)


def by_part(x: Tensor | None, count: int) -> Tensor | None:
    return None if x is None else x.unflatten(0, (-1, count))


def join(y: Tensor, count: int, tokens: int) -> Tensor:
    """(B S,H,L,V) -> (B,H,T,V)."""
    return by_part(y, count).movedim(1, 2).flatten(2, 3)[:, :, :tokens]
