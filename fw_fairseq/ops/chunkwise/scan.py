"""The recurrence in chunks: matrix products inside a chunk, and the memory carried from chunk to chunk.

``chunk`` has the mathematics of one chunk and ``frames`` the ways to keep its decay in range. This file has the loop over chunks,
its plan and its autograd. The backward keeps the inputs and one memory per chunk, and recomputes the rest. For ``torch.compile``
all of it is one operator, ``scan_portable``: a traced loop is long, and how a chunk runs depends on the values of its gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...autograd import (
    EVERYWHERE,
    as_written,
    call,
    is_compiling,
    is_exporting,
    need_kept,
    needs_gradient,
    once_differentiable,
    register,
)
from ...errors import Mistake
from ...rules import Coefficients
from .frames import (
    CHUNK,
    SMALLEST_GATE,
    SMALLEST_NEAR_GATE,
    SMALLEST_NEAR_PRODUCT,
    ChannelGates,
    ChannelGatesWithZeros,
    Given,
    NearGates,
    TokenGates,
    TokenGatesWithZeros,
    put,
    rows_of,
    take,
)
from .large_gates import SMALLEST_FP32_GATE, LargeChannelGates
from .single import SingleTokens

Plan = list[tuple[slice, Any]]  # the turns in order, each with the way to run its chunks

BESIDE = 2**18  # numbers in the memories before all chunks that are computed side by side, as many as fit into a cache


class ChunkScan(torch.autograd.Function):
    """The recurrence over T tokens. It keeps the inputs, and for each chunk the memory before it and the inverse for its erase."""

    @staticmethod
    @as_written
    def forward(ctx: Any, *inputs) -> tuple[Tensor, Tensor]:
        *operands, memory, keep = inputs
        ctx.plan = turns(plan(operands, memory.dtype), memory)
        y, last, memories, inverses = run(operands, ctx.plan, memory, keep)
        if keep:
            ctx.save_for_backward(*operands, *memories, *inverses)
        ctx.set_materialize_grads(False)
        return y, last

    @staticmethod
    @once_differentiable
    @as_written
    def backward(ctx: Any, dy: Tensor | None, dmemory: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: with activation checkpointing, asking again computes again, or fails
        operands, kept = saved[:7], saved[7:]
        return *run_backward(operands, ctx.plan, kept[: len(ctx.plan)], kept[len(ctx.plan) :], dy, dmemory), None


def run(operands: Given, chunks: Plan, memory: Tensor, keep: bool) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor | None]]:
    """Returns y, the last memory, and with ``keep`` for each turn the memories before its chunks and their inverses."""
    v, memories, inverses = operands[2], [], []
    y, carried = torch.empty_like(v), memory.flatten(0, 1)
    for span, way in chunks:
        y_chunk, carried, inverse, starts = way.forward(take(operands, span), carried)
        put(y, span, y_chunk)
        carried = carried.to(memory.dtype)
        if keep:
            memories.append(starts)
            inverses.append(inverse)
    return y, carried.unflatten(0, v.shape[:2]), memories, inverses


def run_backward(
    operands: Given,
    chunks: Plan,
    memories: Sequence[Tensor],
    inverses: Sequence[Tensor | None],
    dy: Tensor | None,
    dmemory: Tensor | None,
) -> list[Tensor | None]:
    """Returns the gradients of the operands and of the first memory. An inverse that is None is made again."""
    sequences, dtype = operands[0].shape[:2], memories[0].dtype
    grads = [None if x is None else torch.empty_like(x) for x in operands]
    first = memories[0][: sequences.numel()]
    dmemory = torch.zeros_like(first) if dmemory is None else dmemory.flatten(0, 1).clone()  # chunks use it up
    for (span, way), starts, inverse in zip(reversed(chunks), reversed(memories), reversed(inverses)):
        given, work = take(operands, span), way.dtype or dtype
        dy_chunk = torch.zeros_like(given.v, dtype=work) if dy is None else rows_of(dy, span).to(work)
        parts, dmemory = way.backward(given, starts, inverse, dy_chunk, dmemory.to(work))
        for grad, part in zip(grads, parts):
            if grad is not None:
                put(grad, span, part)
    return [*grads, dmemory.to(dtype).unflatten(0, sequences)]


def plan(operands: Given, dtype: torch.dtype) -> Plan:
    """The chunks in order, each with the way to run it, which depends on the smallest of its gates. A graph that is exported
    cannot look at gates: with one gate per token each of its chunks is ready for gates of 0, and with gates per channel it has
    single tokens."""
    q, _, _, f, z, e, _ = operands
    cuts = spans(q.shape[2])
    if z is None and (f is None or f.dim() == 3):
        if f is None or f.is_meta:
            return [(span, TokenGates) for span in cuts]
        small = [True] * q.shape[2] if is_exporting() else (f < SMALLEST_GATE).flatten(0, 1).any(0).tolist()  # of each token
        return [(span, TokenGatesWithZeros if any(small[span]) else TokenGates) for span in cuts]
    if not q.numel() or q.is_meta:  # no gate to look at
        return [(span, ChannelGates) for span in cuts]
    if is_exporting():
        return [(span, SingleTokens) for span in cuts]
    mins = [x.amin((0, 1, *range(3, x.dim()))) for x in (f, z) if x is not None]
    smallest = (mins[0] if len(mins) == 1 else torch.minimum(*mins)).tolist()  # of each token
    by_feature = f is not None and f.dim() == 4 and dtype != torch.float64
    narrow = by_feature and z is not None and e is None
    products = smallest_products(f) if by_feature and z is None and max(smallest) >= SMALLEST_NEAR_GATE else [0.0] * len(cuts)
    ways: list[type] = []
    for span, product in zip(cuts, products):
        least = min(smallest[span])
        if narrow and span.stop - span.start == CHUNK and least >= SMALLEST_FP32_GATE:
            ways.append(LargeChannelGates)
        elif product >= SMALLEST_NEAR_PRODUCT and least >= SMALLEST_NEAR_GATE:
            ways.append(NearGates)
        else:
            ways.append(ChannelGates if least > 0 else way_with_zeros(f, z, span))
    return list(zip(cuts, ways))


def turns(chunks: Plan, memory: Tensor) -> Plan:
    """The same with chunks that run side by side in one turn, as many as the processor's cache has room for. An exported graph has
    one at a time, for any number of sequences."""
    if is_exporting():
        return chunks
    most, found = max(1, BESIDE // max(memory.numel(), 1)) * CHUNK, chunks[:1]
    for span, way in chunks[1:]:
        before, kind = found[-1]
        if way is kind and way.side_by_side and span.stop - span.start == CHUNK and span.stop - before.start <= most:
            found[-1] = slice(before.start, span.stop), way
        else:
            found.append((span, way))
    return found


def smallest_products(f: Tensor) -> list[float]:
    """The smallest product of the gates (B,H,T,K) of one channel over each chunk."""
    tokens = f.shape[2]
    whole = tokens - tokens % CHUNK
    parts = [f[:, :, :whole].unflatten(2, (-1, CHUNK)).prod(3).amin((0, 1, 3))] if whole else []
    if whole < tokens:
        parts.append(f[:, :, whole:].prod(2).amin().view(1))
    return torch.cat(parts).tolist()


def way_with_zeros(f: Tensor | None, z: Tensor | None, span: slice) -> type:
    """The moving frame where a token with zeros has them in all gates of one side; else, steps."""
    zeros = [(x[:, :, span] if x.dim() == 4 else x[:, :, span, None]) == 0 for x in (f, z) if x is not None]
    sides = [x.all(-1) for x in zeros]
    some = [(x.any(-1) & ~side).any() for x, side in zip(zeros, sides)]
    both = [(sides[0] & sides[1]).any()] if len(sides) == 2 else []
    return SingleTokens if torch.stack(some + both).any() else ChannelGatesWithZeros


def spans(tokens: int) -> list[slice]:
    """The tokens of each chunk."""
    return [slice(t, min(t + CHUNK, tokens)) for t in range(0, tokens, CHUNK)]


def chunk_form(q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients, memory: Tensor) -> tuple[Tensor, Tensor]:
    """q, k (B,H,T,K), v (B,H,T,V), memory (B,H,K,V) -> y (B,H,T,V) in v's dtype, final memory; computed in memory's dtype."""
    if coefficients.z is not None and coefficients.e is not None:
        raise Mistake("a rule with both a value-side decay z and an erase e has no chunk form; use backend='recurrent'")
    if coefficients.w is not None and coefficients.w is coefficients.e:  # torch.compile wants no input twice
        coefficients = coefficients._replace(w=coefficients.w.view_as(coefficients.w))
    inputs = (q, k, v, *coefficients, memory)
    keep = needs_gradient(*inputs)
    if is_compiling() or isinstance(q.shape[2], torch.SymInt):  # an exported graph of any length has the operator, too
        return call("scan_portable", *inputs, keep)[:2]
    return ChunkScan.apply(*inputs, keep)


@as_written
def _scan(*inputs) -> tuple[Tensor, Tensor, Tensor]:
    """y, the last memory, and those before each chunk, (chunks B H,K,V), for the backward."""
    *operands, memory, keep = inputs
    y, last, memories, _ = run(operands, turns(plan(operands, memory.dtype), memory), memory, keep)
    return y, last.contiguous(), torch.cat(memories) if keep else memory.new_empty(0)


def _scan_fake(*inputs) -> tuple[Tensor, Tensor, Tensor]:
    q, _, v, *_, memory, keep = inputs
    batch, heads, *matrix = memory.shape
    kept = (-(-q.shape[2] // CHUNK) * batch * heads, *matrix) if keep else (0,)
    return torch.empty_like(v), memory.new_empty(memory.shape), memory.new_empty(kept)


@as_written
def _scan_backward(*inputs) -> list[Tensor]:
    """The gradients of the operands that are there, and of the first memory."""
    *operands, memories, dy, dmemory = inputs
    first = memories[: operands[0].shape[:2].numel()]
    chunks = turns(plan(operands, memories.dtype), first)
    sizes = [len(spans(span.stop - span.start)) * first.shape[0] for span, _ in chunks]
    grads = run_backward(operands, chunks, memories.split(sizes), [None] * len(chunks), dy, dmemory)
    return [x.contiguous() if i == len(operands) else x for i, x in enumerate(grads) if x is not None]


def _scan_backward_fake(*inputs) -> list[Tensor]:
    q, memories = inputs[0], inputs[7]
    grads = [torch.empty_like(x) for x in inputs[:7] if x is not None]
    return [*grads, memories.new_empty(*q.shape[:2], *memories.shape[1:])]


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *operands, _memory, keep = inputs
    need_kept("scan_portable", keep)
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*operands, output[2])


def _differentiate(ctx: Any, dy: Tensor | None, dmemory: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    *operands, memories = ctx.saved_tensors
    grads = iter(call("scan_portable_backward", *operands, memories, dy, dmemory))
    return *(None if x is None else next(grads) for x in operands), next(grads), None


SCHEMA = "Tensor q, Tensor k, Tensor v, Tensor? f, Tensor? z, Tensor? e, Tensor? w"
register(
    "scan_portable",
    f"({SCHEMA}, Tensor memory, bool keep) -> (Tensor, Tensor, Tensor)",
    _scan,
    _scan_fake,
    _setup_context,
    _differentiate,
    device=EVERYWHERE,
)
register(
    "scan_portable_backward",
    f"({SCHEMA}, Tensor memories, Tensor? dy, Tensor? dmemory) -> Tensor[]",
    _scan_backward,
    _scan_backward_fake,
    device=EVERYWHERE,
)
