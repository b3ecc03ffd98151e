"""The recurrence in CUDA kernels: ``cuda_form`` chooses a kernel family, checks that it can run, and is differentiable.

The kernels of a family (``cuda/*.cu``) have one Python file each, named in ``FAMILIES``, with

    supported(q, k, v, f, z, e, w, row_map) -> str | None
        None, or a sentence that says what about these inputs has no kernel: widths, gates, or with ``launch.capability(device)``
        below (8, 0) what needs products of bf16 or tf32.
    saved_like(q, k, v, f, z, e, w, memory, precision, row_map) -> list of (shape, dtype)
        the tensors that forward keeps for backward; shapes may be symbolic, so no ``int()``.
    forward(launch, q, k, v, f, z, e, w, memory, precision, keep, row_map) -> (y, memory_out, saved)
        saved: a tuple as ``saved_like`` says, () without ``keep``; new tensors, none an input or an output.
    backward(launch, q, k, v, f, z, e, w, memory, saved, dy, dmemory, precision, row_map) -> (dq, dk, dv, df, dz, de, dw, dmemory)
        None where the input is None.

What they can rely on: q, k (B,H,T,K) and v, y, dy (B,H,T,V) have one dtype, fp32, bf16 or fp16; f, z, e, w are fp32, None where
absent; the last dimension of all is contiguous (of f (B,H,T), e and w too), other strides are anything; memory and dmemory
(B,H,K,V) are fp32 and contiguous. What they must do: y and dv are ``torch.empty_like(v)``, and likewise the other gradients,
contiguous or not; memory_out is contiguous. ``launch`` is described in ``cuda_launch``. With another row_map than ``AS_IS`` q and k
are (B,H,T,D): it makes the features, inside the kernels, and dq and dk are those of the rows.

precision: "bf16" for 16-bit inputs. For fp32, "exact" (as accurate as fp32) unless the environment has FW_FAIRSEQ_FP32=tf32, which
is faster and rounds the operands of products to 11 bits.
"""

from __future__ import annotations

import os
from types import ModuleType

import torch
from torch import Tensor

from ...row_map import AS_IS, RowMap
from ...rules import Coefficients
from ..parallel.parts import choose_parts, run_parts
from . import decay as cuda_decay
from . import delta as cuda_delta
from . import launch as cuda_launch

FAMILIES: dict[str, ModuleType] = {"decay": cuda_decay, "erase": cuda_delta}  # by what the rule does
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PRECISIONS = ("exact", "tf32")
LIBRARY = torch.library.Library("fw_fairseq", "FRAGMENT")


def cuda_form(
    q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients, memory: Tensor, row_map: RowMap = AS_IS
) -> tuple[Tensor, Tensor]:
    """q, k (B,H,T,K), v (B,H,T,V) of one dtype, memory (B,H,K,V) -> y (B,H,T,V) in that dtype, final memory in fp32.

    With a ``row_map`` q and k are (B,H,T,D), and their features only ever exist inside the kernels, unless time is in segments."""
    processors = cuda_launch.current().processors(q.device)
    count = choose_parts(q.shape[0] * q.shape[1], q.shape[2], processors)
    if count == 1:
        return run_kernels(q, k, v, coefficients, memory, row_map)
    return run_parts(run_kernels, count, row_map(q), row_map(k), v, coefficients, memory)


def run_kernels(q, k, v, coefficients: Coefficients, memory: Tensor, row_map: RowMap = AS_IS) -> tuple[Tensor, Tensor]:
    precision = choose_precision(v.dtype)
    operands = [None if x is None else dense(x) for x in (q, k, v, *coefficients)]
    memory = memory.contiguous()
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*operands, memory))
    y, memory, _ = torch.ops.fw_fairseq.scan(*operands, memory, precision, keep, *row_map)
    return y, memory


def why_not(q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients, row_map: RowMap = AS_IS) -> str | None:
    """A sentence that says why ``cuda_form`` cannot run on these inputs; None where it can."""
    if reason := cuda_launch.current().why_not(q.device):
        return reason
    if v.dtype not in DTYPES:
        return f"backend='cuda' has kernels for {', '.join(map(str, DTYPES))}, not for {v.dtype}"
    return family(coefficients.e).supported(q, k, v, *coefficients, row_map)


def dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def choose_precision(dtype: torch.dtype) -> str:
    if dtype != torch.float32:
        return "bf16"
    precision = os.environ.get("FW_FAIRSEQ_FP32", PRECISIONS[0])
    if precision not in PRECISIONS:
        raise ValueError(f"FW_FAIRSEQ_FP32 is {precision!r}; allowed: {', '.join(PRECISIONS)}")
    return precision


def family(e: Tensor | None):
    return FAMILIES["decay" if e is None else "erase"]


INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? f, Tensor? z, Tensor? e, Tensor? w, Tensor memory"
ROW_MAP = "str name, int nu, str norm"
LIBRARY.define(
    f"scan({INPUTS}, str precision, bool keep, {ROW_MAP}) -> (Tensor, Tensor, Tensor[])", tags=(torch.Tag.pt2_compliant_tag,)
)
LIBRARY.define(
    f"scan_backward({INPUTS}, Tensor[] saved, Tensor dy, Tensor dmemory, str precision, {ROW_MAP}) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def scan(q, k, v, f, z, e, w, memory, precision: str, keep: bool, *row_map):
    inputs = (q, k, v, f, z, e, w, memory, precision, keep, RowMap(*row_map))
    y, memory, saved = family(e).forward(cuda_launch.current(), *inputs)
    return y, memory, list(saved)


def scan_fake(q, k, v, f, z, e, w, memory, precision: str, keep: bool, *row_map):
    kept = family(e).saved_like(q, k, v, f, z, e, w, memory, precision, RowMap(*row_map)) if keep else []
    return torch.empty_like(v), torch.empty_like(memory), [memory.new_empty(shape, dtype=dtype) for shape, dtype in kept]


def scan_backward(q, k, v, f, z, e, w, memory, saved, dy, dmemory, precision: str, *row_map):
    inputs = (q, k, v, f, z, e, w, memory, tuple(saved), dy, dmemory, precision, RowMap(*row_map))
    return [grad for grad in family(e).backward(cuda_launch.current(), *inputs) if grad is not None]


def scan_backward_fake(q, k, v, f, z, e, w, memory, saved, dy, dmemory, precision: str, *row_map):
    return [torch.empty_like(x) for x in (q, k, v, f, z, e, w, memory) if x is not None]


def setup_context(ctx, inputs, output) -> None:
    operands, (ctx.precision, keep), ctx.row_map = inputs[:8], inputs[8:10], inputs[10:]
    saved = output[2]
    if not keep:
        raise RuntimeError("fw_fairseq::scan was called with keep=False on tensors that require gradients")
    ctx.mark_non_differentiable(*saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*operands, *saved)


def backward(ctx, dy, dmemory, _dsaved):
    operands, saved = ctx.saved_tensors[:8], list(ctx.saved_tensors[8:])
    dy = torch.zeros_like(operands[2]) if dy is None else dense(dy)
    dmemory = torch.zeros_like(operands[7]) if dmemory is None else dmemory.contiguous()
    grads = iter(torch.ops.fw_fairseq.scan_backward(*operands, saved, dy, dmemory, ctx.precision, *ctx.row_map))
    return *(None if x is None else next(grads) for x in operands), *[None] * (2 + len(ctx.row_map))


LIBRARY.impl("scan", scan, "CUDA")
LIBRARY.impl("scan_backward", scan_backward, "CUDA")
torch.library.register_fake("fw_fairseq::scan", scan_fake, lib=LIBRARY)
torch.library.register_fake("fw_fairseq::scan_backward", scan_backward_fake, lib=LIBRARY)
torch.library.register_autograd("fw_fairseq::scan", backward, setup_context=setup_context, lib=LIBRARY)
