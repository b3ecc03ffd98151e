"""The registration of the kernels' operators, ``torch.ops.fw_fairseq.*``."""

from __future__ import annotations

from collections.abc import Callable

import torch

LIBRARY = torch.library.Library("fw_fairseq", "FRAGMENT")
OPERATORS: dict[str, Callable] = {}  # by name, the function that launches; tests run the same ones on an emulator


def register_operator(
    name: str, schema: str, run: Callable, fake: Callable, setup_context: Callable | None = None, backward: Callable | None = None
) -> None:
    """Defines ``torch.ops.fw_fairseq.<name>``, which ``torch.compile`` keeps in one graph.

    Args:
        schema: the arguments and the results in torch.library's notation, ``(Tensor q, ...) -> Tensor``.
        run: what the operator does on a GPU.
        fake: returns tensors with the shapes, dtypes and strides of the results, for tracing; sizes may be symbolic.
        setup_context, backward: the two halves of its gradient as for ``torch.library.register_autograd``; none without both.
    """
    OPERATORS[name] = run
    LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, run, "CUDA")
    torch.library.register_fake(f"fw_fairseq::{name}", fake, lib=LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"fw_fairseq::{name}", backward, setup_context=setup_context, lib=LIBRARY)
