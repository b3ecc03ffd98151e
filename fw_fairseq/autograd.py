"""What all gradients written by hand share: autograd functions, operators of PyTorch, and a division whose gradient stays finite.

``register`` makes ``torch.ops.fw_fairseq.<name>``, which ``torch.compile`` and ``torch.export`` keep in one graph. On its way to a
kernel such a call goes through torch's dispatcher and several Python wrappers, which take longer than most kernels. So the
operation starts its kernels with ``call``, which leaves all that out where nobody looks at the call on its way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

SMALLEST_LENGTH = 1e-12
LIBRARY = torch.library.Library("fw_fairseq", "FRAGMENT")
OPERATORS: dict[str, Callable] = {}  # by name, the function that launches; tests run the same ones on an emulator
FUNCTIONS: dict[str, Callable] = {}  # by name, the same with a gradient, where there is one
EVERYWHERE = "CompositeExplicitAutograd"  # torch's word for an operator that any device runs
PLAIN = (Tensor, torch.nn.Parameter)
NO_TENSORS = (type(None), bool, int, float, str, list, tuple)
NOTHING = nullcontext()


def as_written(function: Callable) -> Callable:
    """Runs a forward or backward, of an autograd function or of an operator, without autocast and without gradients: its products
    keep the dtypes that they are written with, and ``torch.export``, which traces a forward with gradients on, can trace it."""

    @functools.wraps(function)
    def run(*inputs) -> Any:
        device = next((x.device.type for x in inputs if isinstance(x, Tensor)), "cpu")  # an input without a gradient comes as None
        with torch.no_grad(), without_autocast(device):
            return function(*inputs)

    return run


def without_autocast(device: str) -> AbstractContextManager:
    """Products keep the dtypes that they are written with. ``device``: the type of the tensors' device; "meta" has no autocast."""
    if device == "meta" or not (torch.compiler.is_compiling() or torch.is_autocast_enabled(device)):
        return NOTHING  # an exported graph may run under autocast
    return torch.autocast(device, enabled=False)


def unit(x: Tensor) -> Tensor:
    """x divided by its length. A length below 1e-12 counts as that: a vector of zeros stays so, with a finite gradient."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / length.clamp(min=SMALLEST_LENGTH).masked_fill(length == 0, 1)


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Returns whether autograd records what is done with any of these."""
    if torch.is_grad_enabled():
        for x in tensors:  # a generator would take several times as long
            if x is not None and x.requires_grad:
                return True
    return False


def slices_of(x: Tensor, spans: Sequence[slice]) -> Sequence[Tensor]:
    """Returns the spans of x (B,H,S,X) in S, which may overlap. Their gradients are added up in one tensor: the gradient of one
    index is as large as x, and that of many would take time that grows with the square of S."""
    if not needs_gradient(x) or torch.compiler.is_compiling():
        return [x[:, :, span] for span in spans]
    return Slices.apply(x, *spans)


class Slices(torch.autograd.Function):
    """The spans of a tensor."""

    @staticmethod
    @as_written
    def forward(ctx: Any, x: Tensor, *spans: slice) -> tuple[Tensor, ...]:
        ctx.spans, ctx.length = spans, x.shape[2]
        return tuple(x[:, :, span] for span in spans)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return Sum.apply(ctx.length, ctx.spans, *gradients), *(None for _ in ctx.spans)


class Sum(torch.autograd.Function):
    """A tensor of ``length`` tokens with the sum of what was given for its spans: the gradient of ``Slices``, which has one too."""

    @staticmethod
    @as_written
    def forward(ctx: Any, length: int, spans: Sequence[slice], *parts: Tensor) -> Tensor:
        ctx.spans = spans
        first = parts[0]
        total = first.new_zeros(*first.shape[:2], length, first.shape[3])
        for span, part in zip(spans, parts):
            total[:, :, span] += part
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *Slices.apply(gradient, *ctx.spans)


def once_differentiable(backward: Callable) -> Callable:
    """Decorates a backward whose results have no gradient. PyTorch's decorator of this name takes them for constants if the
    gradients that come in are constants, so that a penalty on a gradient is lost without a word; here that is an error too."""

    @functools.wraps(backward)
    def run(ctx: Any, *gradients) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():  # nobody asked for create_graph
            return backward(ctx, *gradients)
        saved = ctx.saved_tensors  # once: with activation checkpointing, asking again computes again, or fails
        with torch.no_grad():
            found = backward(SimpleNamespace(**vars(ctx), saved_tensors=saved, needs_input_grad=ctx.needs_input_grad), *gradients)
        given = [x for x in found if x is not None]
        tied = iter(NoSecond.apply(len(given), *given, *(x for x in (*gradients, *saved) if needs_gradient(x))))
        return tuple(None if x is None else next(tied) for x in found)

    return run


class NoSecond(torch.autograd.Function):
    """The first ``count`` tensors as they are, tied to the others, which they were made of. Their gradient is refused."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Sequence[None]:
        raise RuntimeError(
            "a gradient of a gradient was asked for, and the backward of this operation is once_differentiable; fast_weight has"
            " such gradients with backend='recurrent'"
        )


def register(
    name: str,
    schema: str,
    run: Callable,
    fake: Callable,
    setup_context: Callable | None = None,
    backward: Callable | None = None,
    device: str = "CUDA",
) -> None:
    """Defines ``torch.ops.fw_fairseq.<name>``.

    Args:
        schema: the arguments and the results in torch.library's notation, ``(Tensor q, ...) -> Tensor``.
        run: what the operator does.
        fake: returns tensors with the shapes, dtypes and strides of the results, for tracing; sizes may be symbolic.
        setup_context, backward: the two halves of its gradient as for ``torch.library.register_autograd``; none without both.
        device: where it does so, "CUDA" or ``EVERYWHERE``.
    """
    OPERATORS[name] = run
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, run, device)
    torch.library.register_fake(f"fw_fairseq::{name}", fake, lib=LIBRARY)
    if backward is not None and setup_context is not None:
        torch.library.register_autograd(f"fw_fairseq::{name}", backward, setup_context=setup_context, lib=LIBRARY)
        FUNCTIONS[name] = _function(name, run, setup_context, backward)


def _function(name: str, run: Callable, setup_context: Callable, backward: Callable) -> Callable:
    """The operator and its gradient as an autograd function, which is called without what torch does for transforms of functions:
    where those are, nobody calls it."""

    def forward(ctx: Any, *inputs) -> Any:
        output = run(*inputs)
        setup_context(ctx, inputs, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(once_differentiable(backward))}
    function: Any = type(f"fw_fairseq_{name}", (torch.autograd.Function,), methods)
    return super(torch.autograd.Function, function).apply


def call(name: str, *inputs) -> Any:
    """As ``torch.ops.fw_fairseq.<name>(*inputs)``."""
    seen = is_seen(inputs)
    learns = needs_gradient(*[x for x in inputs if (isinstance(x, Tensor) if seen else x.__class__ in PLAIN)])
    if learns and name not in FUNCTIONS:  # torch would only warn, and take the result for a constant
        raise RuntimeError(f"fw_fairseq::{name} has no gradient, and one of its inputs requires one; call it under torch.no_grad()")
    if seen:
        return getattr(torch.ops.fw_fairseq, name)(*inputs)
    return FUNCTIONS[name](*inputs) if learns else OPERATORS[name](*inputs)


def is_compiling() -> bool:
    """Whether ``torch.compile`` traces. ``torch.export`` is something else: others run its graph without this project."""
    return torch.compiler.is_compiling() and not is_exporting()


def is_exporting() -> bool:
    """Whether ``torch.export`` traces. torch 2.6 does not say."""
    return getattr(torch.compiler, "is_exporting", bool)()


def need_kept(name: str, keep: bool) -> None:
    """Refuses the gradient of a call that kept nothing for it."""
    if not keep:
        raise RuntimeError(f"fw_fairseq::{name} was called with keep=False on tensors that require gradients")


def is_seen(inputs: Sequence[Any]) -> bool:
    """Whether somebody looks at calls with these inputs: as ``is_watched``, or a class of tensors of its own."""
    return is_watched() or bool([x for x in inputs if x.__class__ not in PLAIN and x.__class__ not in NO_TENSORS])


def is_watched() -> bool:
    """Whether somebody looks at all calls: a compiler, a transform such as ``vmap``, forward mode, or a dispatch mode such as a
    counter of operations."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )
