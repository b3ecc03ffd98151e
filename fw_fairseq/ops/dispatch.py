"""The form that runs the recurrence: kernels, chunks, steps or factors."""

from __future__ import annotations

import torch
from torch import Tensor

from ..row_map import AS_IS, RowMap
from ..rules import Coefficients
from .chunkwise.scan import chunk_form
from .factored import Factors, factored_form
from .kernels import recurrence as kernels
from .kernels.launch import current, log_once
from .kernels.maps import why_no_map
from .kernels.step import step_cuda_form
from .kernels.step import why_not as why_no_step_kernel
from .recurrent import step_form


def run_form(backend: str, row_map: RowMap, q, k, v, coefficients: Coefficients, memory):
    """As ``chunk_form``. "auto": kernels where they run; else steps for one token and for what has no chunk form, else chunks."""
    if isinstance(memory, Factors):
        return factored_form(row_map(q), row_map(k), v, coefficients, memory)
    if backend in ("recurrent", "chunkwise"):
        return {"recurrent": step_form, "chunkwise": chunk_form}[backend](q, k, v, coefficients, memory)
    if backend == "cuda" or has_kernels(q):
        q, k = q.to(v.dtype), k.to(v.dtype)  # normalisation makes v fp32
        leaves = (q, k, v, *coefficients, memory)
        learning = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves)
        form, reason = choose_kernel(q, k, v, coefficients, learning, row_map)
        no_map = why_no_map(row_map)
        if reason is not None and row_map != AS_IS and not (backend == "cuda" and no_map):
            q, k, row_map = row_map(q), row_map(k), AS_IS
            form, reason = choose_kernel(q, k, v, coefficients, learning, row_map)
            if reason is None and no_map:
                log_once(no_map, "the map runs in PyTorch, before the kernels")
        if reason is None:
            return form(q, k, v, coefficients, memory, row_map)
        if backend == "cuda":
            raise ValueError(reason)
        log_once(reason)
    stepwise = q.shape[2] == 1 or (coefficients.z is not None and coefficients.e is not None)
    return (step_form if stepwise else chunk_form)(q, k, v, coefficients, memory)


def has_kernels(q: Tensor) -> bool:
    """On its device, that is; whether one fits is for ``choose_kernel`` to say."""
    return q.device.type == current().device_type


def choose_kernel(q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients, learning: bool, row_map: RowMap):
    """(form, None), or (None, a sentence that says why there is no kernel for these inputs)."""
    if q.shape[2] == 1 and not learning and why_no_step_kernel(q, v, coefficients, row_map) is None:
        return step_cuda_form, None
    reason = kernels.why_not(q, k, v, coefficients, row_map)
    return (kernels.cuda_form, None) if reason is None else (None, reason)
