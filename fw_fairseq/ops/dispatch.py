"""The form that runs the recurrence: kernels, chunks, steps or factors.

A form is called as ``form(q, k, v, coefficients, memory)`` with q, k (B,H,T,K), v (B,H,T,V), memory (B,H,K,V) and returns
y (B,H,T,V) in v's dtype and the memory after the last token. Kernels take a ``RowMap`` as one more argument.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..autograd import needs_gradient
from ..errors import Mistake
from ..feature_maps import AS_IS
from .chunkwise.scan import chunk_form
from .factored import Factors, factored_form
from .inputs import Inputs
from .kernels import recurrence as kernels
from .kernels.common import why_no_map
from .kernels.launch import current, log_once
from .kernels.step import step_cuda_form, step_divided_form
from .kernels.step import why_not as why_no_step_kernel
from .parallel.workers import run_across
from .recurrent import step_form


class Plan(NamedTuple):
    """The form for one call."""

    form: Callable[..., tuple[Tensor, Tensor]]
    is_kernel: bool = False
    reason: str | None = None  # why no kernel runs, where one was to


def run(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """y (B,H,T,V) in v's dtype, and the memory after the last token; of all workers' tokens where there is a group."""
    if inputs.group is not None:
        return run_on_workers(inputs)
    if asks_for_kernels(inputs):  # they take one dtype, and attention normalisation makes v fp32
        inputs = inputs._replace(q=inputs.q.to(inputs.v.dtype), k=inputs.k.to(inputs.v.dtype))
    q, k, v, coefficients, memory = inputs.q, inputs.k, inputs.v, inputs.coefficients, inputs.state.memory
    plan = choose(inputs)
    if plan.is_kernel:
        return plan.form(q, k, v, coefficients, memory, inputs.row_map)
    no_map = None if plan.reason is None else why_no_map(inputs.row_map)
    if inputs.row_map != AS_IS and not (no_map and inputs.backend == "cuda"):  # a kernel that does not make features may take them
        mapped = inputs.mapped()
        if no_map and choose(mapped).is_kernel:
            log_once(no_map, "the map runs in PyTorch, before the kernels")
        return run(mapped)
    if plan.reason is not None:
        if inputs.backend == "cuda":
            raise Mistake(plan.reason)
        log_once(plan.reason)
    return plan.form(q, k, v, coefficients, memory)


def choose(inputs: Inputs) -> Plan:
    """The form that ``backend`` asks for. With "auto" kernels run where they can; else one token and coefficients without a chunk
    form run as steps, everything else as chunks. A memory kept as factors decides for itself."""
    if isinstance(inputs.state.memory, Factors):
        return Plan(factored_form)
    if inputs.backend == "recurrent":
        return Plan(step_form)
    if inputs.backend == "chunkwise":
        return Plan(chunk_form)
    reason = None
    if asks_for_kernels(inputs):
        plan = choose_kernel(inputs)
        if plan.reason is None:
            return plan
        reason = plan.reason
    stepwise = inputs.q.shape[2] == 1 or (inputs.coefficients.z is not None and inputs.coefficients.e is not None)
    return Plan(step_form if stepwise else chunk_form, reason=reason)


def choose_kernel(inputs: Inputs) -> Plan:
    """The kernel for these inputs, or the sentence that says why there is none."""
    q, k, v, coefficients, row_map = inputs.q, inputs.k, inputs.v, inputs.coefficients, inputs.row_map
    if q.shape[2] == 1 and why_no_step_kernel(q, v, coefficients, row_map) is None and not learns(inputs):
        return Plan(step_cuda_form, is_kernel=True)
    reason = kernels.why_not(q, k, v, coefficients, row_map)
    return Plan(kernels.cuda_form, is_kernel=reason is None, reason=reason)


def divided_kernel(inputs: Inputs) -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
    """The kernel that also divides the reads, by sums of keys that follow the writes; None where no kernel does."""
    q, k, v, coefficients, row_map = inputs.q, inputs.k, inputs.v, inputs.coefficients, inputs.row_map
    if not asks_for_kernels(inputs) or inputs.group is not None or isinstance(inputs.state.memory, Factors):
        return None
    if q.shape[2] == 1 and not learns(inputs):
        return step_divided_form if why_no_step_kernel(q, v, coefficients, row_map) is None else None
    return kernels.run_divided if kernels.divides(q, k, v, coefficients, row_map) else None


def learns(inputs: Inputs) -> bool:
    """Whether a gradient may be asked for."""
    return needs_gradient(inputs.q, inputs.k, inputs.v, *inputs.coefficients, inputs.state.memory, inputs.state.normaliser)


def run_on_workers(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Each worker runs its own part, with more columns and from other memories than these inputs have."""

    def form(q, k, v, coefficients, memory):
        state = inputs.state._replace(memory=memory)
        return run(inputs._replace(q=q, k=k, v=v, coefficients=coefficients, state=state, group=None))

    return run_across(inputs.group, form, inputs.q, inputs.k, inputs.v, inputs.coefficients, inputs.state.memory)


def asks_for_kernels(inputs: Inputs) -> bool:
    """Whether ``choose`` looks for a kernel."""
    return inputs.backend == "cuda" or (inputs.backend == "auto" and has_kernels(inputs.q))


def has_kernels(x: Tensor) -> bool:
    """Whether kernels run on the device of x; ``choose_kernel`` says whether one fits."""
    return x.device.type == current().device_type


def maps_inside(inputs: Inputs) -> bool:
    """Whether ``run`` may be given rows before their feature map, because only kernels will see them."""
    sums_keys = inputs.attention_norm and inputs.rule.normaliser == "keys"
    return (
        inputs.backend in ("auto", "cuda")
        and inputs.group is None
        and inputs.rule.step is None
        and inputs.rule.simple
        and not sums_keys
        and has_kernels(inputs.q)
    )
