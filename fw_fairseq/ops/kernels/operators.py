"""Kernels as operators of PyTorch, and the shorter way to them.

``register`` makes ``torch.ops.fw_fairseq.<name>``, which ``torch.compile`` and ``torch.export`` keep in one graph. On its way to a
kernel such a call goes through torch's dispatcher and several Python wrappers, which take longer than most kernels. So the
operation starts its kernels with ``call``, which leaves all that out where nobody looks at the call on its way.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...autograd import needs_gradient, once_differentiable

LIBRARY = torch.library.Library("fw_fairseq", "FRAGMENT")
OPERATORS: dict[str, Callable] = {}  # by name, the function that launches; tests run the same ones on an emulator
FUNCTIONS: dict[str, type[torch.autograd.Function]] = {}  # by name, those of operators with a gradient
PLAIN = (Tensor, torch.nn.Parameter)
EVERYWHERE = "CompositeExplicitAutograd"  # torch's word for an operator that any device runs


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
    if backward is not None:
        torch.library.register_autograd(f"fw_fairseq::{name}", backward, setup_context=setup_context, lib=LIBRARY)
        FUNCTIONS[name] = function(name, run, setup_context, backward)


def function(name: str, run: Callable, setup_context: Callable, backward: Callable) -> type[torch.autograd.Function]:
    """The operator and its gradient as an autograd function."""

    def forward(ctx, *inputs):
        output = run(*inputs)
        setup_context(ctx, inputs, output)
        return output

    methods = {"forward": staticmethod(forward), "backward": staticmethod(once_differentiable(backward))}
    return type(f"fw_fairseq_{name}", (torch.autograd.Function,), methods)


def call(name: str, *inputs):
    """As ``torch.ops.fw_fairseq.<name>(*inputs)``."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    learns = needs_gradient(*tensors)
    if learns and name not in FUNCTIONS:  # torch would only warn, and take the result for a constant
        raise RuntimeError(f"fw_fairseq::{name} has no gradient, and one of its inputs requires one; call it under torch.no_grad()")
    if seen(tensors):
        return getattr(torch.ops.fw_fairseq, name)(*inputs)
    return FUNCTIONS[name].apply(*inputs) if learns else OPERATORS[name](*inputs)


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


def seen(tensors: list[Tensor]) -> bool:
    """Whether somebody looks at calls with these tensors: a compiler, a transform such as ``vmap``, forward mode, a dispatch mode
    such as a counter of operations, or a class of tensors of its own."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or any(type(x) not in PLAIN for x in tensors)
    )
