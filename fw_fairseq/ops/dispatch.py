"""The form that runs the recurrence: kernels, chunks, steps or factors.

A form in PyTorch is called as ``form(q, k, v, coefficients, memory)`` with q, k (B,H,T,K), v (B,H,T,V), memory (B,H,K,V), and
returns y (B,H,T,V) in v's dtype and the memory after the last token. Kernels take the same as ``Operands``, with a ``RowMap``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..autograd import needs_gradient, without_autocast
from ..errors import Mistake
from ..feature_maps import AS_IS, RowMap
from ..rules import Coefficients
from .chunkwise.scan import chunk_form
from .factored import Factors, factored_form
from .inputs import Inputs
from .kernels.family import Divided, Operands
from .kernels.launch import has_kernels, log_once, why_no_map, why_not_run
from .kernels.recurrence import FAMILIES, choose_family, choose_precision, cuda_form, in_many_parts, joined_decays, run_whole
from .kernels.step import step_cuda_form, unsupported
from .onnx import TRACE, onnx_form
from .parallel.workers import run_across
from .recurrent import step_form
from .state import FastWeightState


class Choice(NamedTuple):
    """The form for one call, with all that it takes."""

    run: Callable[[], tuple[Tensor, ...]]  # y, the memory, and more that a kernel returns
    is_kernel: bool = False
    reason: str | None = None  # why no kernel runs, where one was to


def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """y (B,H,T,V) in v's dtype, and the memory after the last token; of all workers' tokens where there is a group."""
    if inputs.group is not None:
        return run_on_workers(inputs)
    choice = choose(inputs)
    if choice.reason is not None:
        if inputs.backend == "cuda":
            raise Mistake(choice.reason)
        log_once(choice.reason)
    y, memory, *_ = choice.run()
    return y, memory


def choose(inputs: Inputs) -> Choice:
    """The form that ``backend`` asks for. With "auto" kernels run where they can; else one token and coefficients without a chunk
    form run as steps, everything else as chunks. A memory kept as factors decides for itself. A feature map runs inside the
    kernels, or before all forms."""
    reason = None
    if inputs.kernels and not isinstance(inputs.state.memory, Factors):
        inputs = inputs._replace(q=inputs.q.to(inputs.v.dtype), k=inputs.k.to(inputs.v.dtype))  # normalisation may make v fp32
        choice = choose_kernel(inputs)
        if choice.reason is None:
            return choice
        no_map = why_no_map(inputs.row_map)
        if inputs.row_map != AS_IS and not (no_map and inputs.backend == "cuda"):
            choice = choose_kernel(mapped(inputs))
            if choice.reason is None:
                if no_map:
                    log_once(no_map, "the map runs in PyTorch, before the kernels")
                return choice
        reason = choice.reason
    inputs = mapped(inputs)
    form: Callable[..., tuple[Any, ...]] = step_form
    if isinstance(inputs.state.memory, Factors):
        form = factored_form
    elif TRACE.on:
        form = onnx_form
    elif inputs.backend != "recurrent":
        z, e = inputs.coefficients.z, inputs.coefficients.e
        stepwise = inputs.backend != "chunkwise" and (inputs.q.shape[2] == 1 or (z is not None and e is not None))
        form = step_form if stepwise else chunk_form
    memory = inputs.state.memory.contiguous() if inputs.empty else inputs.state.memory
    return Choice(partial(form, inputs.q, inputs.k, inputs.v, inputs.coefficients, memory), reason=reason)


def mapped(inputs: Inputs) -> Inputs:
    """The same with features in place of the rows that they are made of. With attention normalisation they are in fp32 where the
    rows are in fp16, which does not hold the gradient of a small divisor."""
    if inputs.row_map == AS_IS:
        return inputs
    half = inputs.attention_norm and inputs.q.dtype == torch.float16
    q, k = (inputs.row_map(x.float() if half else x) for x in (inputs.q, inputs.k))
    return inputs._replace(q=q, k=k, row_map=AS_IS)


def choose_kernel(inputs: Inputs, divided: Divided | None = None) -> Choice:
    """The kernel for these inputs, or the sentence that says why there is none. With ``divided`` it also divides the reads."""
    q, k, v, coefficients, row_map = inputs.q, inputs.k, inputs.v, inputs.coefficients, inputs.row_map
    if reason := why_not_run(q, v) or why_no_map(row_map):
        return Choice(tuple, reason=reason)
    memory = None if inputs.empty else inputs.state.memory
    x = Operands(q, k, v, *coefficients, memory, choose_precision(v.dtype, inputs.half), row_map, divided, inputs.ends)
    if q.shape[2] == 1 and not needs_gradient(*x[:8], inputs.state.normaliser):
        reason = unsupported(q, coefficients, row_map)
        if reason is None or divided is not None:
            return Choice(partial(step_cuda_form, x), is_kernel=reason is None, reason=reason)
    x = joined_decays(x)
    name, reason = choose_scan(x)
    return Choice(partial(cuda_form if divided is None else run_whole, name, x), is_kernel=reason is None, reason=reason)


def choose_scan(x: Operands) -> tuple[str, str | None]:
    """The family of kernels over all tokens, and a sentence that says why it cannot run; None where it can."""
    name, reason = choose_family(x)
    if x.divided is None or reason is not None:
        return name, reason
    if not FAMILIES[name].divides or x.v.dtype == torch.float16 or in_many_parts(x.q):
        reason = "reads are divided outside of the kernels"  # many parts run faster so, and such gradients can leave fp16's range
    return name, reason


def run_divided(inputs: Inputs, least: float) -> tuple[Tensor, FastWeightState] | None:
    """The normalised y and the state from a kernel that also divides the reads, by sums of keys that follow the writes; None where
    no kernel does."""
    state = inputs.state
    if not inputs.kernels or inputs.group is not None or isinstance(state.memory, Factors):
        return None
    dtype = inputs.v.dtype
    if dtype == torch.float16:
        inputs = inputs._replace(q=inputs.q.float(), k=inputs.k.float(), v=inputs.v.float())
    choice = choose_kernel(inputs, Divided(inputs.eps, least, None if inputs.empty else state.normaliser))
    if choice.reason is not None:
        return None
    y, memory, sums = choice.run()
    return y.to(dtype), state._replace(memory=memory, normaliser=sums)


def attend_to_source(
    q: Tensor, k: Tensor, v: Tensor, padding_mask: Tensor | None, row_map: RowMap, eps: float, least: float
) -> Tensor | None:
    """y (B,H,T,V) = phi(q_t)^T W / (phi(q_t) . n + eps) with W = sum_s phi(k_s) v_s^T and n = sum_s phi(k_s), for features that are
    not negative; ``least`` in place of a divisor of 0. None where no kernel can.

    q is (B,H,T,D), k (B,H,S,D), v (B,H,S,V), padding_mask (B,S) True at padding. Source and queries are one text: its first S
    tokens write, and the others read. So the features are never in the device's memory.
    """
    if not has_kernels(q) or why_not_run(q, k, v) or why_no_map(row_map):
        return None
    (B, H, S, _), T, dtype = k.shape, q.shape[2], v.dtype
    written = torch.ones(B, S, device=q.device)
    if padding_mask is not None:
        k, v = (x.masked_fill(padding_mask[:, None, :, None], 0) for x in (k, v))
        written = written.masked_fill(padding_mask, 0)
    inner = torch.float32 if dtype == torch.float16 else dtype  # whose range gradients before the division can leave
    q, k, v = F.pad(q.to(inner), (0, 0, S, 0)), F.pad(k.to(inner), (0, 0, 0, T)), F.pad(v.to(inner), (0, 0, 0, T))
    w = F.pad(written, (0, T))[:, None].expand(-1, H, -1)
    precision = choose_precision(inner, dtype == torch.float16)
    x = Operands(q, k, v, None, None, None, w, None, precision, row_map, Divided(eps, least, None), ends=False)
    name, reason = choose_scan(x)
    if reason is not None:
        return None
    with without_autocast(q.device.type):
        y, *_ = run_whole(name, x)
    return y[:, :, S:].to(dtype)


def run_on_workers(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Each worker runs its own part, with more columns and from other memories than these inputs have."""

    def form(q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients, memory: Tensor) -> tuple[Tensor, Tensor]:
        state = inputs.state._replace(memory=memory)
        return run(inputs._replace(q=q, k=k, v=v, coefficients=coefficients, state=state, group=None))

    return run_across(inputs.group, form, inputs.q, inputs.k, inputs.v, inputs.coefficients, inputs.state.memory)
