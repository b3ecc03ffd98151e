"""The recurrence over all tokens in CUDA kernels: the families, the choice among them, and the operators that run them.

fp32 inputs are computed as accurately as fp32 allows, unless the environment has FW_FAIRSEQ_FP32=tf32, which is faster and rounds
the operands of products to 11 bits.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor

from ...autograd import call, need_kept, needs_gradient, register
from ...errors import Mistake
from ...feature_maps import RowMap
from ...rules import Coefficients
from ..parallel.parts import run_parts
from . import channel_delta, decay, delta, linear
from .family import Divided, Family, Operands
from .launch import current, dense

FAMILIES: dict[str, Family] = {
    "linear": linear.FAMILY,
    "decay": decay.FAMILY,
    "delta": delta.FAMILY,
    "channel_delta": channel_delta.FAMILY,
}
AXES = {3: "per token", 4: "per channel"}
FP32_PRECISIONS = ("exact", "tf32")
SHORTEST = 256  # tokens of a part
LEAST = 4096  # tokens of a sequence: to start what the parts need takes the host longer than a shorter one takes the device
BLOCKS = 2  # parts for each processor, which runs so many blocks of the kernels side by side up to K = V = 64
MANY_PARTS = 16  # so many run faster in parts, with an fp32 column, than whole with the divisor inside the kernels
row_map_of = functools.lru_cache(RowMap)  # sooner than made again


def kinds(coefficients: Coefficients) -> tuple[str, ...]:
    """The coefficients that are present and what they vary over, such as "f per channel" and "w per token"."""
    present = [(name, x.dim()) for name, x in zip(Coefficients._fields, coefficients) if x is not None]
    return tuple(f"{name} {AXES.get(dim, f'of {dim} dimensions')}" for name, dim in present)


def find_family(coefficients: Coefficients) -> str | None:
    """The first family that computes exactly these coefficients; None where no family does."""
    present = kinds(coefficients)
    for name, family in FAMILIES.items():
        if all(kind in family.computes for kind in present) and all(kind in present for kind in family.needs):
            return name
    return None


def choose_family(x: Operands) -> tuple[str, str | None]:
    """The family that computes these coefficients, and a sentence that says why it cannot run here; None where it can."""
    coefficients = Coefficients(*x[3:7])
    name = find_family(coefficients)
    if name is not None:
        return name, FAMILIES[name].supported(x)
    able = "; ".join(f"{known}: {', '.join(family.computes)}" for known, family in FAMILIES.items())
    return "", f"backend='cuda' has no kernel for {', '.join(kinds(coefficients))} together; its families compute {able}"


def joined_decays(x: Operands) -> Operands:
    """With a decay per token and one per value channel as their product, which no family has apart."""
    if x.f is None or x.z is None or x.f.dim() != 3:
        return x
    return x._replace(f=None, z=x.z * x.f.unsqueeze(-1))


def choose_precision(dtype: torch.dtype, half: bool = False) -> str:
    """The precision of products for these inputs, as ``Operands`` describes it. half: they are made of numbers in fp16."""
    if half and dtype == torch.float32:
        return "tf32"
    if dtype != torch.float32:
        return "fp16" if dtype == torch.float16 else "bf16"
    precision = os.environ.get("FW_FAIRSEQ_FP32", FP32_PRECISIONS[0])
    if precision not in FP32_PRECISIONS:
        raise Mistake(f"FW_FAIRSEQ_FP32 is {precision!r}; allowed: {', '.join(FP32_PRECISIONS)}")
    return precision


def choose_parts(sequences: int, tokens: int, processors: int, erase: bool = False, gradients: bool = True) -> int:
    """The number of parts that a sequence runs in: enough that every processor of the device has two; 1 where that does not pay.
    The parts run twice, with erase three times, but backwards once."""
    if not sequences or tokens < LEAST:
        return 1
    count = min(BLOCKS * processors // sequences, tokens // SHORTEST)
    return count if count >= (6 if erase and not gradients else 4) else 1


def in_many_parts(q: Tensor) -> bool:
    """Whether reads are rather divided outside of the kernels."""
    return choose_parts(q.shape[0] * q.shape[1], q.shape[2], current().processors(q.device)) >= MANY_PARTS


def cuda_form(family: str, x: Operands) -> tuple[Tensor, Tensor]:
    """y (B,H,T,V) in the inputs' dtype and the final memory in fp32. The features of a ``row_map`` exist only inside the kernels,
    unless the sequence runs in parts."""
    count, tokens = 1, x.q.shape[2]
    if tokens >= LEAST:
        processors, gradients = current().processors(x.q.device), needs_gradient(*x[:8])
        count = choose_parts(x.q.shape[0] * x.q.shape[1], tokens, processors, x.e is not None, gradients)
    if count == 1:
        return run_whole(family, x)[:2]

    def form(q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients, memory: Tensor) -> tuple[Tensor, Tensor]:
        return run_whole(family, Operands(q, k, v, *coefficients, memory, x.precision))[:2]

    memory = x.q.new_zeros(x.memory_shape, dtype=torch.float32) if x.memory is None else x.memory
    return run_parts(form, count, x.row_map(x.q), x.row_map(x.k), x.v, Coefficients(*x[3:7]), memory)


def run_whole(family: str, x: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """As ``cuda_form``, each sequence from its first token to its last in one launch; with the sums of the keys after the last
    token where reads are divided, else nothing in their place."""
    rows, memory = [None if part is None else dense(part) for part in x[:6]], None if x.memory is None else x.memory.contiguous()
    rows.append(rows[5] if x.w is x.e else None if x.w is None else dense(x.w))  # the same of delta rules
    sums, eps, least = (None, 0.0, 0.0) if x.divided is None else (x.divided.sums, x.divided.eps, x.divided.least)
    sums = None if sums is None else sums.contiguous()
    keep = needs_gradient(*rows, memory, sums)
    return call("scan", *rows, memory, sums, eps, least, family, x.precision, keep, x.ends, *x.row_map)[:3]


def _scan(*inputs) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    q, k, v, f, z, e, w, memory, sums, eps, least, family, precision, keep, ends, *by_name = inputs
    row_map = row_map_of(*by_name)
    divided = Divided(eps, least, sums, sums_like(q, row_map)) if least else None
    x = Operands(q, k, v, f, z, e, w, memory, precision, row_map, divided, ends)
    y, final, saved = FAMILIES[family].forward(current(), x, keep)
    after: Any = final.new_empty(0) if divided is None else divided.final
    return y, final, after, list(saved)


def sums_like(q: Tensor, row_map: RowMap) -> Tensor:
    """Room for sums of the features of keys, (B,H,K)."""
    return q.new_empty((*q.shape[:2], row_map.width(q.shape[3])), dtype=torch.float32)


def _scan_fake(*inputs) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    q, k, v, f, z, e, w, memory, _, eps, least, family, precision, keep, ends, *by_name = inputs
    row_map = RowMap(*by_name)
    after = sums_like(q, row_map)
    x = Operands(q, k, v, f, z, e, w, memory, precision, row_map, Divided(eps, least, after) if least else None, ends)
    kept = [q.new_empty(shape, dtype=kind) for shape, kind in (FAMILIES[family].saved_like(x) if keep else [])]
    final = q.new_empty(x.memory_shape if ends else 0, dtype=torch.float32)
    return torch.empty_like(v), final, after if least else final.new_empty(0), kept


def _scan_backward(*inputs) -> list[Tensor]:
    q, k, v, f, z, e, w, memory, saved, y, dy, dmemory, dsums, eps, least, family, precision, *row_map = inputs
    before = None if dsums is None else torch.empty_like(dsums)
    divided = Divided(eps, least, before, dsums, y) if least else None
    x = Operands(q, k, v, f, z, e, w, memory, precision, row_map_of(*row_map), divided)
    grads = FAMILIES[family].backward(current(), x, tuple(saved), dy, dmemory)
    return [grad for grad in (*grads, before) if grad is not None]


def _scan_backward_fake(*inputs) -> list[Tensor]:
    return [torch.empty_like(x) for x in (*inputs[:8], inputs[12]) if x is not None]


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    operands, keep, (y, _, after, saved) = inputs[:9], inputs[13], output
    ctx.settings = (*inputs[9:13], *inputs[15:])
    need_kept("scan", keep)
    divided = inputs[10] != 0
    ctx.mark_non_differentiable(*saved, *([] if divided else [after]))
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*operands, y if divided else None, *saved)


def _backward(ctx: Any, dy: Tensor | None, dmemory: Tensor | None, dsums: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors  # once: with activation checkpointing, asking again computes again, or fails
    operands, y, saved = tensors[:9], tensors[9], list(tensors[10:])
    dy = torch.zeros_like(operands[2]) if dy is None else dense(dy)
    dmemory = None if dmemory is None else dmemory.contiguous()
    if operands[8] is not None and dsums is None:
        dsums = torch.zeros_like(operands[8])
    dsums = None if dsums is None else dsums.contiguous()
    found = call("scan_backward", *operands[:8], saved, y, dy, dmemory, dsums, *ctx.settings)
    grads, place = [None] * (len(ctx.settings) + 11), 0
    for i, x in enumerate(operands):
        if x is not None:
            grads[i], place = found[place], place + 1
    return tuple(grads)


INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? f, Tensor? z, Tensor? e, Tensor? w"
ROW_MAP = "str name, int nu, str norm"
DIVIDED = "Tensor? sums, float eps, float least"  # least is 0 where reads are not divided
register(
    "scan",
    f"({INPUTS}, Tensor? memory, {DIVIDED}, str family, str precision, bool keep, bool ends, {ROW_MAP}) "
    "-> (Tensor, Tensor, Tensor, Tensor[])",
    _scan,
    _scan_fake,
    _setup_context,
    _backward,
)
register(
    "scan_backward",
    f"({INPUTS}, Tensor? memory, Tensor[] saved, Tensor? y, Tensor dy, Tensor? dmemory, Tensor? dsums, float eps, float least, "
    f"str family, str precision, {ROW_MAP}) -> Tensor[]",
    _scan_backward,
    _scan_backward_fake,
)
