"""The elementwise scan of simple recurrent units: over time, in parallel over batch and width.

    f_t = sigmoid(F_t + v_f c_{t-1})        c_t = f_t c_{t-1} + (1 - f_t) u_t
    r_t = sigmoid(R_t + v_r c_{t-1})        h_t = r_t c_t + (1 - r_t) s x_t

Only f and c wait for the step before, with three operations on (B,D) per step; r and h follow for many steps at once. The backward
is dc_{t-1} = E_{t-1} + M_t dc_t with M_t = f_t + v_f (c_{t-1} - u_t) f_t (1 - f_t), where E and M are known for many steps at once.
Both run in blocks of steps, so that intermediate results stay in the processor's cache.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...autograd import EVERYWHERE, as_written, call, needs_gradient, register
from ...errors import Mistake
from ...feature_maps import wide
from ..checks import check_masks, check_tokens
from ..kernels.launch import use_kernels
from . import compiled
from .sru_kernel import sru_cuda_form, why_not

BLOCK = 2**17  # numbers of each tensor at a time


def sru(
    product: Tensor,
    x: Tensor,
    v_forget: Tensor,
    v_reset: Tensor,
    state: Tensor | None = None,
    padding_mask: Tensor | None = None,
    reset_mask: Tensor | None = None,
    scale: float = 1.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """h (T,B,D) in the dtype of product, and the last c (B,D) in fp32 (float64 for float64 inputs).

    product: (T,B,3D), u, F and R side by side; T is at least 1. x: (T,B,D). v_forget, v_reset: (D). scale: s.
    state: (B,D), the c that an earlier call returned; None for 0.
    padding_mask: (B,T) bool. A padded step leaves c unchanged, and its output is 0.
    reset_mask: (B,T) bool, True at the first token of a new text, which starts from c = 0.
    backend: "cuda" runs the kernels, "torch" PyTorch, "auto" the kernels where they can run.
    """
    if product.shape != (*x.shape[:2], 3 * x.shape[2]):
        raise Mistake(f"product is {tuple(product.shape)} and x {tuple(x.shape)}; they must be (T,B,3D) and (T,B,D)")
    check_tokens("x", x, len(x))
    if state is not None and state.shape != x.shape[1:]:
        raise Mistake(f"state is {tuple(state.shape)}; it must be {tuple(x.shape[1:])}")
    check_masks(padding_mask, reset_mask, (x.shape[1], x.shape[0]))
    dtype = torch.float64 if product.dtype == torch.float64 else torch.float32
    c = product.new_zeros(x.shape[1:], dtype=dtype) if state is None else state
    if use_kernels(backend, product.device, partial(why_not, product, x)):
        return sru_cuda_form(*product.chunk(3, -1), x * scale, v_forget, v_reset, c, padding_mask, reset_mask)
    padded = None if padding_mask is None else padding_mask.t()[..., None]
    keep = None if reset_mask is None else (~reset_mask).t()[..., None].to(dtype)
    operands = product, x, wide(v_forget), wide(v_reset), c
    return call("sru_portable", *operands, padded, keep, scale, needs_gradient(*operands))[:2]


@as_written
def _forward(*inputs) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns h, the last c, and what the backward needs beside the operands: every c, with the first, and every f and r."""
    product, x, v_forget, v_reset, first, padded, keep, scale, gradients = inputs
    operands = product, x, v_forget, v_reset, first
    if compiled.takes(*operands):
        h, c, *gates = compiled.sru(*operands, padded, keep, scale, gradients)
        saved: list[Any] = [c, *gates] if gradients else []
        return h, c[-1].clone() if gradients else c, saved
    h, *kept = forward_in_blocks(*operands, padded, keep, scale)
    return h, kept[0][-1].clone(), kept if gradients else []


def _forward_fake(*inputs) -> tuple[Tensor, Tensor, list[Tensor]]:
    (product, x), first, gradients = inputs[:2], inputs[4], inputs[8]
    steps = [x.shape[0] + extra for extra in (1, 0, 0)] if gradients else []
    saved = [first.new_empty(count, *first.shape) for count in steps]
    return product.new_empty(x.shape), first.new_empty(first.shape), saved


def forward_in_blocks(*inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns h, and every c, f and r."""
    product, x, v_forget, v_reset, first, padded, keep, scale = inputs
    steps = StepOperands(product, v_forget, v_reset, padded, keep, first.new_empty(len(x) + 1, *first.shape))
    steps.c[0] = before = first
    h, f, r = (first.new_empty(x.shape) for _ in range(3))
    for span in steps.spans():
        rows = zip(steps.forget(span).unbind(), steps.u(span).unbind(), f[span].unbind(), steps.c[1:][span].unbind())
        for t, (forget, u, f_t, c) in enumerate(rows, span.start):
            before = before if keep is None else before * keep[t]
            before = torch.lerp(u, before, torch.addcmul(forget, steps.v_forget, before, out=f_t).sigmoid_(), out=c)
        steps.reset(span, out=r[span]).sigmoid_()
        torch.lerp(torch.mul(x[span].to(h.dtype), scale), steps.c[1:][span], r[span], out=h[span])
    if padded is not None:
        h.masked_fill_(padded, 0)
    return h.to(product.dtype), steps.c, f, r


@as_written
def _backward(*inputs) -> list[Tensor]:
    """Returns the gradients of product, x, v_forget, v_reset and the first c."""
    product, x, v_forget, v_reset, padded, keep, c, forgets, resets, dh, dlast, scale = inputs
    steps = StepOperands(product, v_forget, v_reset, padded, keep, c)
    dproduct, dx = c.new_empty(product.shape), c.new_empty(x.shape)
    du, dforget, dreset = dproduct.chunk(3, -1)
    dv_forget, dv_reset, dc = c.new_zeros(x.shape[2]), c.new_zeros(x.shape[2]), dlast
    dh = dh if padded is None else dh.masked_fill(padded, 0)
    for span in reversed(steps.spans()):
        past, now, dh_now = steps.past(span), c[1:][span], dh[span].to(c.dtype)
        f, r = forgets[span], resets[span]
        of_reset = through_sigmoid(torch.add(now, x[span], alpha=-scale).mul_(dh_now), r)
        slope = through_sigmoid(past - steps.u(span), f)  # of c_t in F_t
        step = torch.addcmul(f, steps.v_forget, slope)  # of c_t in c_{t-1}
        of_past = of_reset * steps.v_reset  # through r
        if keep is not None:
            step, of_past = step.mul_(keep[span]), of_past.mul_(keep[span])
        rows = r * dh_now  # of c_t through h_t; then all of it
        torch.add(dh_now * scale, rows, alpha=-scale, out=dx[span])
        rows[:-1] += of_past[1:]
        rows[-1] += dc
        after, *earlier = reversed(rows.unbind())
        for row, step_after in zip(earlier, reversed(step.unbind())):
            after = row.addcmul_(step_after, after)
        dc = of_past[0].addcmul(step[0], after)
        torch.addcmul(rows, rows, f, value=-1, out=du[span])
        dforget[span], dreset[span] = slope.mul_(rows), of_reset
        dv_forget += over_rows(slope.mul_(past))
        dv_reset += over_rows(of_reset.mul_(past))
    return [dproduct.to(product.dtype), dx.to(x.dtype), dv_forget, dv_reset, dc]


def _backward_fake(*inputs) -> list[Tensor]:
    (product, x), c = inputs[:2], inputs[6]
    grads = [part.new_empty(part.shape) for part in (product, x)]
    return grads + [c.new_empty(shape) for shape in (x.shape[2:], x.shape[2:], x.shape[1:])]


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *operands, _first, padded, keep, ctx.scale, gradients = inputs
    if not gradients:
        raise RuntimeError("fw_fairseq::sru_portable was called with gradients=False on tensors that require gradients")
    ctx.mark_non_differentiable(*output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*operands, padded, keep, *output[2])


def _differentiate(ctx: Any, dh: Tensor | None, dlast: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    product, x, *_, c, _forgets, _resets = saved = ctx.saved_tensors
    dh = product.new_zeros(x.shape) if dh is None else dh
    dlast = torch.zeros_like(c[0]) if dlast is None else dlast
    return *call("sru_portable_backward", *saved, dh, dlast, ctx.scale), None, None, None, None


class StepOperands:
    """The operands of a block of steps, in c's dtype."""

    def __init__(
        self, product: Tensor, v_forget: Tensor, v_reset: Tensor, padded: Tensor | None, keep: Tensor | None, c: Tensor
    ) -> None:
        self.parts, self.padded, self.keep, self.c = product.chunk(3, -1), padded, keep, c  # c: the first one, then each step's
        self.v_forget, self.v_reset = (v.expand(c.shape[1:]).contiguous() for v in (v_forget, v_reset))

    def spans(self) -> list[slice]:
        total = len(self.c) - 1
        length = max(1, BLOCK // max(1, self.c[0].numel()))
        return [slice(t, min(t + length, total)) for t in range(0, total, length)]

    def u(self, span: slice) -> Tensor:
        return self.parts[0][span].to(self.c.dtype)

    def forget(self, span: slice) -> Tensor:
        """F; a padded step keeps everything."""
        forget = self.parts[1][span].to(self.c.dtype)
        return forget if self.padded is None else forget.masked_fill(self.padded[span], float("inf"))

    def reset(self, span: slice, out: Tensor) -> Tensor:
        """The argument of the sigmoid that gives r."""
        return torch.addcmul(self.parts[2][span].to(self.c.dtype), self.v_reset, self.past(span), out=out)

    def past(self, span: slice) -> Tensor:
        """c_{t-1} as step t sees it."""
        past = self.c[:-1][span]
        return past if self.keep is None else past * self.keep[span]


def through_sigmoid(gradient: Tensor, y: Tensor) -> Tensor:
    """gradient y (1 - y), in one pass."""
    return torch.ops.aten.sigmoid_backward(gradient, y)


def over_rows(x: Tensor) -> Tensor:
    """(T,B,D) -> (D): the sum, as a product, which is several times as fast."""
    rows = x.flatten(0, 1)
    return torch.mv(rows.t(), rows.new_ones(len(rows)))


SCHEMA = "Tensor product, Tensor x, Tensor v_forget, Tensor v_reset"
MASKS = "Tensor? padded, Tensor? keep"
register(
    "sru_portable",
    f"({SCHEMA}, Tensor first, {MASKS}, float scale, bool gradients) -> (Tensor, Tensor, Tensor[])",
    _forward,
    _forward_fake,
    _setup_context,
    _differentiate,
    device=EVERYWHERE,
)
register(
    "sru_portable_backward",
    f"({SCHEMA}, {MASKS}, Tensor c, Tensor forgets, Tensor resets, Tensor dh, Tensor dlast, float scale) -> Tensor[]",
    _backward,
    _backward_fake,
    device=EVERYWHERE,
)
