"""The products of sparse layers for few tokens. Those of a feed-forward layer read the rows of the chosen units only.

On a CPU compiled loops (``ops/native``) read them where they lie; on a GPU one kernel does, ``cuda/gathered.cu``. Without a
compiler PyTorch copies the rows first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ...autograd import call
from ...ops import native
from ...ops.kernels.launch import use_kernels
from . import kernel

SHARE = 4  # as many tokens read at most this share of a matrix: beyond it, a product with all of it is faster
ROWS = 32  # of a product that one row of weights serves at a time
RELU = (F.relu, torch.relu)
MANY = 2**17  # numbers from which on threads share the work


def few_rows(rows: int, block: int) -> bool:
    """Whether so many tokens, each of which reads one row of ``block``, are few."""
    return rows == 1 or rows * SHARE <= block


def takes(*tensors: Tensor) -> bool:
    """Whether the compiled loops take these operands: contiguous tensors in memory, all of one type, without gradients."""
    dtype = tensors[0].dtype
    plain = all(x.device.type == "cpu" and x.dtype == dtype and x.is_contiguous() for x in tensors)
    known = plain and dtype in native.GATHERED_NAMES and not torch.is_grad_enabled()
    return known and not torch.compiler.is_compiling() and native.library() is not None


def threads(numbers: int) -> int:
    """How many threads share the work on so many numbers."""
    return torch.get_num_threads() if numbers > MANY else 1


def chosen_units(x: Tensor, inner: Tensor, outer: Tensor, bias: Tensor, weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Returns the unit that each token chooses of each block, (R,F/N), and the product of its row with the token, (R,F/N).

    x: (R,C). The logits of the F units are outer inner x + bias, with inner (r,C), outer (F,r) and bias (F). weight: (F,C).
    """
    rows, blocks = len(x), len(weight) // block
    operands = x.contiguous(), inner, outer, bias, weight
    if takes(*operands):
        chosen, hidden = x.new_empty(rows, blocks, dtype=torch.long), x.new_empty(rows, blocks)
        sizes = native.integers(rows, x.shape[1], len(inner), len(weight), block, threads(inner.numel() + outer.numel()))
        call = native.loop("choose", x.dtype)
        call(*(part.data_ptr() for part in (*operands, chosen, hidden)), sizes)
        return chosen, hidden
    logits = F.linear(F.linear(x, inner), outer, bias).view(rows, blocks, block)
    chosen = logits.argmax(-1) + torch.arange(0, len(weight), block, device=x.device)
    return chosen, torch.bmm(F.embedding(chosen, weight), x.unsqueeze(-1)).squeeze(-1)


def feed_forward(
    x: Tensor,
    inner: Tensor,
    outer: Tensor,
    controller_bias: Tensor,
    weight_in: Tensor,
    weight_out: Tensor,
    bias: Tensor,
    block: int,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """Returns a sparse feed-forward layer's output for few tokens, (R,C); shapes as in ``chosen_units`` and ``sum_of_units``."""
    operands = x, inner, outer, controller_bias, weight_in, weight_out, bias
    if activation in RELU and use_kernels("auto", x.device, lambda: kernel.why_not(*operands, block=block)):
        return call("sparse_feed_forward", *operands, block)
    chosen, hidden = chosen_units(*operands[:5], block)
    return sum_of_units(activation(hidden), chosen, weight_out, bias)


def sum_of_units(hidden: Tensor, chosen: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns sum_i hidden_i weight[chosen_i] + bias, (R,C). hidden and chosen: (R,F/N). weight: (F,C)."""
    (rows, blocks), width = chosen.shape, weight.shape[1]
    operands = hidden.contiguous(), weight, bias
    if takes(*operands):
        y = hidden.new_empty(rows, width)
        pointers = [part.data_ptr() for part in (operands[0], chosen, weight, bias, y)]
        sizes = native.integers(rows, width, blocks, threads(rows * blocks * width))
        native.loop("sum", hidden.dtype)(*pointers, sizes)
        return y
    return F.embedding_bag(chosen, weight, mode="sum", per_sample_weights=hidden.to(weight.dtype)) + bias


def gained(x: Tensor, gains: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Returns weight (x * gains_n) for each row of gains side by side, plus the bias, (...,O). x: (...,I), gains (M,I), weight
    (O/M,I), where the last rows are left out if O is no multiple of M; bias (O)."""
    if x.numel() == x.shape[-1] and takes(x, gains, weight, bias):
        return few_products(x, gains, weight, bias, len(gains), x.shape[:-1])
    return F.linear(x.unsqueeze(-2) * gains, weight).flatten(-2)[..., : len(bias)] + bias


def rows_product(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x weight^T for few rows x (...,S,I), weight (O,I), as (...,S O)."""
    rows = x.numel() // x.shape[-1]
    if 0 < rows <= ROWS and takes(x, weight):
        return few_products(x, None, weight, None, rows, x.shape[:-2])
    return F.linear(x, weight).flatten(-2)


def few_products(x: Tensor, gains: Tensor | None, weight: Tensor, bias: Tensor | None, rows: int, shape: torch.Size) -> Tensor:
    """Calls the loop for so many rows of x, or of gains."""
    outputs, width = weight.shape
    y = x.new_empty(*shape, rows * outputs // shape.numel() if bias is None else len(bias))
    pointers = [0 if part is None else part.data_ptr() for part in (x, gains, weight, bias, y)]
    sizes = native.integers(rows, width, outputs, y.numel(), threads(weight.numel()))
    native.loop("few", x.dtype)(*pointers, sizes)
    return y
