"""The recurrence over all tokens in CUDA kernels: the operators ``scan`` and ``scan_backward``, and the form that calls them.

``families`` has the kernels and chooses among them. fp32 inputs are computed as accurately as fp32 allows, unless the environment
has FW_FAIRSEQ_FP32=tf32, which is faster and rounds the operands of products to 11 bits.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from ...autograd import needs_gradient
from ...errors import Mistake
from ...feature_maps import AS_IS, RowMap
from ...rules import Coefficients
from ..parallel.parts import choose_parts, run_parts
from . import launch
from .common import Divided, dense, why_no_map, why_not_run
from .families import family_of, why_no_family
from .operators import call, need_kept, register

FP32_PRECISIONS = ("exact", "tf32")
MANY_PARTS = 16  # so many run faster in parts, with an fp32 column, than whole with the divisor inside the kernels


def cuda_form(
    q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients, memory: Tensor, row_map: RowMap = AS_IS
) -> tuple[Tensor, Tensor]:
    """q, k (B,H,T,K), v (B,H,T,V) of one dtype, memory (B,H,K,V) -> y (B,H,T,V) in that dtype, final memory in fp32.

    With a ``row_map`` q and k are (B,H,T,D). Their features exist only inside the kernels, unless the sequence runs in parts.
    """
    count = parts_of(q, coefficients.e is not None, needs_gradient(q, k, v, *coefficients, memory))
    if count == 1:
        return run_kernels(q, k, v, coefficients, memory, row_map)
    return run_parts(run_kernels, count, row_map(q), row_map(k), v, coefficients, memory)


def parts_of(q: Tensor, erase: bool = False, gradients: bool = True) -> int:
    """In how many parts the sequences run."""
    return choose_parts(q.shape[0] * q.shape[1], q.shape[2], launch.current().processors(q.device), erase, gradients)


def run_kernels(
    q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients, memory: Tensor, row_map: RowMap = AS_IS
) -> tuple[Tensor, Tensor]:
    """As ``cuda_form``, each sequence from its first token to its last in one launch."""
    precision, coefficients = choose_precision(v.dtype), join_decays(coefficients)
    operands = [None if x is None else dense(x) for x in (q, k, v, *coefficients)]
    memory = memory.contiguous()
    keep = needs_gradient(*operands, memory)
    y, memory, _ = call("scan", *operands, memory, precision, keep, *row_map)
    return y, memory


def run_divided(
    q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients, memory: Tensor, sums: Tensor, eps: float, least: float,
    row_map: RowMap = AS_IS,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """As ``run_kernels`` where reads are divided as ``Divided`` says; with the sums of the keys after the last token."""
    operands = [None if x is None else dense(x) for x in (q, k, v, *coefficients)]
    operands += [memory.contiguous(), sums.contiguous()]
    keep = needs_gradient(*operands)
    precision = choose_precision(v.dtype)
    y, memory, sums, _ = call("scan_divided", *operands, eps, least, precision, keep, *row_map)
    return y, memory, sums


def divides(q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients, row_map: RowMap = AS_IS) -> bool:
    """Whether ``run_divided`` runs on these inputs: in few parts only, and not in fp16, whose range divided gradients can leave."""
    if coefficients.z is not None or v.dtype == torch.float16 or why_not(q, k, v, coefficients, row_map):
        return False
    family = family_of(*coefficients)
    return parts_of(q) < MANY_PARTS and family.DIVIDES and family.supported(q, k, v, *coefficients, row_map, divided=True) is None


def why_not(q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients, row_map: RowMap = AS_IS) -> str | None:
    """A sentence that says why ``cuda_form`` cannot run on these inputs; None where it can."""
    coefficients = join_decays(coefficients)
    if reason := why_not_run(q, v) or why_no_map(row_map) or why_no_family(coefficients):
        return reason
    return family_of(*coefficients).supported(q, k, v, *coefficients, row_map)


def join_decays(coefficients: Coefficients) -> Coefficients:
    """The coefficients with a decay per token and one per value channel as their product, which no family has apart."""
    f, z = coefficients.f, coefficients.z
    if f is None or z is None or f.dim() != 3:
        return coefficients
    return coefficients._replace(f=None, z=z * f.unsqueeze(-1))


def choose_precision(dtype: torch.dtype) -> str:
    """The precision of products for these inputs, as ``Family`` describes it."""
    if dtype != torch.float32:
        return "bf16"
    precision = os.environ.get("FW_FAIRSEQ_FP32", FP32_PRECISIONS[0])
    if precision not in FP32_PRECISIONS:
        raise Mistake(f"FW_FAIRSEQ_FP32 is {precision!r}; allowed: {', '.join(FP32_PRECISIONS)}")
    return precision


def scan(q, k, v, f, z, e, w, memory, precision: str, keep: bool, *row_map):
    inputs = (q, k, v, f, z, e, w, memory, precision, keep, RowMap(*row_map))
    y, memory, saved = family_of(f, z, e, w).forward(launch.current(), *inputs)
    return y, memory, list(saved)


def scan_fake(q, k, v, f, z, e, w, memory, precision: str, keep: bool, *row_map):
    inputs = (q, k, v, f, z, e, w, memory, precision, RowMap(*row_map))
    kept = family_of(f, z, e, w).saved_like(*inputs) if keep else []
    return torch.empty_like(v), torch.empty_like(memory), [memory.new_empty(shape, dtype=dtype) for shape, dtype in kept]


def scan_backward(q, k, v, f, z, e, w, memory, saved, dy, dmemory, precision: str, *row_map):
    inputs = (q, k, v, f, z, e, w, memory, tuple(saved), dy, dmemory, precision, RowMap(*row_map))
    return [grad for grad in family_of(f, z, e, w).backward(launch.current(), *inputs) if grad is not None]


def scan_backward_fake(q, k, v, f, z, e, w, memory, saved, dy, dmemory, precision: str, *row_map):
    return [torch.empty_like(x) for x in (q, k, v, f, z, e, w, memory) if x is not None]


def setup_context(ctx, inputs, output) -> None:
    operands, (ctx.precision, keep), ctx.row_map = inputs[:8], inputs[8:10], inputs[10:]
    saved = output[2]
    need_kept("scan", keep)
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*operands, *saved)


def backward(ctx, dy, dmemory, _dsaved):
    tensors = ctx.saved_tensors  # once: with activation checkpointing, asking again computes again, or fails
    operands, saved = tensors[:8], list(tensors[8:])
    dy = torch.zeros_like(operands[2]) if dy is None else dense(dy)
    dmemory = torch.zeros_like(operands[7]) if dmemory is None else dmemory.contiguous()
    grads = iter(call("scan_backward", *operands, saved, dy, dmemory, ctx.precision, *ctx.row_map))
    return *(None if x is None else next(grads) for x in operands), *[None] * (2 + len(ctx.row_map))


def scan_divided(q, k, v, f, z, e, w, memory, sums, eps: float, least: float, precision: str, keep: bool, *row_map):
    divided = Divided(eps, least, sums, torch.empty_like(sums))
    inputs = (q, k, v, f, z, e, w, memory, precision, keep, RowMap(*row_map), divided)
    y, memory, saved = family_of(f, z, e, w).forward(launch.current(), *inputs)
    return y, memory, divided.final, list(saved)


def scan_divided_fake(q, k, v, f, z, e, w, memory, sums, eps: float, least: float, precision: str, keep: bool, *row_map):
    inputs = (q, k, v, f, z, e, w, memory, precision, RowMap(*row_map), True)
    kept = family_of(f, z, e, w).saved_like(*inputs) if keep else []
    saved = [memory.new_empty(shape, dtype=dtype) for shape, dtype in kept]
    return torch.empty_like(v), torch.empty_like(memory), torch.empty_like(sums), saved


def scan_divided_backward(q, k, v, f, z, e, w, memory, saved, y, dy, dmemory, dsums, eps, least, precision: str, *row_map):
    divided = Divided(eps, least, torch.empty_like(dsums), dsums, y)
    inputs = (q, k, v, f, z, e, w, memory, tuple(saved), dy, dmemory, precision, RowMap(*row_map), divided)
    grads = family_of(f, z, e, w).backward(launch.current(), *inputs)
    return [grad for grad in (*grads, divided.sums) if grad is not None]


def scan_divided_backward_fake(q, k, v, f, z, e, w, memory, saved, y, dy, dmemory, dsums, eps, least, precision: str, *row_map):
    return [torch.empty_like(x) for x in (q, k, v, f, z, e, w, memory, dsums) if x is not None]


def setup_divided_context(ctx, inputs, output) -> None:
    operands, (*ctx.settings, keep), row_map = inputs[:9], inputs[9:13], inputs[13:]
    y, _, _, saved = output
    need_kept("scan_divided", keep)
    ctx.settings += row_map
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*operands, y, *saved)


def divided_backward(ctx, dy, dmemory, dsums, _dsaved):
    tensors = ctx.saved_tensors  # once, as in ``backward``
    operands, y, saved = tensors[:9], tensors[9], list(tensors[10:])
    dy = torch.zeros_like(y) if dy is None else dense(dy)
    after = (torch.zeros_like(x) if g is None else g.contiguous() for g, x in ((dmemory, operands[7]), (dsums, operands[8])))
    grads = iter(call("scan_divided_backward", *operands[:8], saved, y, dy, *after, *ctx.settings))
    return *(None if x is None else next(grads) for x in operands), *[None] * (len(ctx.settings) + 1)


INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? f, Tensor? z, Tensor? e, Tensor? w, Tensor memory"
ROW_MAP = "str name, int nu, str norm"
DIVIDED = "Tensor sums, float eps, float least"
register(
    "scan",
    f"({INPUTS}, str precision, bool keep, {ROW_MAP}) -> (Tensor, Tensor, Tensor[])",
    scan,
    scan_fake,
    setup_context,
    backward,
)
register(
    "scan_backward",
    f"({INPUTS}, Tensor[] saved, Tensor dy, Tensor dmemory, str precision, {ROW_MAP}) -> Tensor[]",
    scan_backward,
    scan_backward_fake,
)
register(
    "scan_divided",
    f"({INPUTS}, {DIVIDED}, str precision, bool keep, {ROW_MAP}) -> (Tensor, Tensor, Tensor, Tensor[])",
    scan_divided,
    scan_divided_fake,
    setup_divided_context,
    divided_backward,
)
register(
    "scan_divided_backward",
    f"({INPUTS}, Tensor[] saved, Tensor y, Tensor dy, Tensor dmemory, Tensor dsums, float eps, float least, str precision, "
    f"{ROW_MAP}) -> Tensor[]",
    scan_divided_backward,
    scan_divided_backward_fake,
)
