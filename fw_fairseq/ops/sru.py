"""The elementwise scan of simple recurrent units, over time, parallel in batch and width.

    f_t = sigmoid(F_t + v_f c_{t-1})        c_t = f_t c_{t-1} + (1 - f_t) u_t
    r_t = sigmoid(R_t + v_r c_{t-1})        h_t = r_t c_t + (1 - r_t) x_t

Only f waits for the step before: three operations on (B,D) a step; r and h follow for all steps at once. In the backward all but
one product is known beforehand: dc_{t-1} = E_{t-1} + M_t dc_t with M_t = f_t + v_f (c_{t-1} - u_t) f_t (1 - f_t).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..feature_maps import wide
from .cuda_launch import use_kernels
from .cuda_sru import sru_cuda_form, why_not


def sru(
    u, forget, reset, x, v_forget, v_reset, state=None, padding_mask=None, reset_mask=None, backend="auto"
) -> tuple[Tensor, Tensor]:
    """u, F, R, x (T,B,D), v_f, v_r (D), state (B,D) -> h (T,B,D) in u's dtype, the last c (B,D) in fp32 (float64 for float64).

    A padded step (B,T) leaves c as it is and outputs 0; a text that begins at a reset starts from c = 0.
    backend: "cuda" the kernels, "torch" PyTorch, "auto" the kernels where they run.
    """
    check(u, forget, reset, x, v_forget, v_reset, state)
    c = wide(u).new_zeros(u.shape[1:]) if state is None else state
    if use_kernels(backend, u.device, partial(why_not, u, x)):
        return sru_cuda_form(u, forget, reset, x, v_forget, v_reset, c, padding_mask, reset_mask)
    padded = None if padding_mask is None else padding_mask.t()[..., None]
    keep = None if reset_mask is None else (~reset_mask).t()[..., None].to(c.dtype)
    forget = wide(forget)
    if padded is not None:
        forget = forget.masked_fill(padded, float("inf"))
    h, c = Scan.apply(wide(u), forget, wide(reset), wide(x), wide(v_forget), wide(v_reset), c, keep)
    if padded is not None:
        h = h.masked_fill(padded, 0)
    return h.to(u.dtype), c


def check(u, forget, reset, x, v_forget, v_reset, state) -> None:
    for name, part in (("forget", forget), ("reset", reset), ("x", x)):
        if part.shape != u.shape or u.dim() != 3:
            raise ValueError(f"{name} is {tuple(part.shape)} and u {tuple(u.shape)}; both must be (T,B,D)")
    for name, part in (("v_forget", v_forget), ("v_reset", v_reset)):
        if part.shape != u.shape[2:]:
            raise ValueError(f"{name} is {tuple(part.shape)}; it must be {tuple(u.shape[2:])}")
    if state is not None and state.shape != u.shape[1:]:
        raise ValueError(f"state is {tuple(state.shape)}; it must be {tuple(u.shape[1:])}")


class Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, forget, reset, x, v_forget, v_reset, c0, keep):
        f = forget.clone(memory_format=torch.contiguous_format)
        c = torch.empty_like(f)
        before = c0
        for t, (f_t, c_t, u_t) in enumerate(zip(f.unbind(), c.unbind(), u.unbind())):
            if keep is not None:
                before = before * keep[t]
            torch.lerp(u_t, before, f_t.addcmul_(v_forget, before).sigmoid_(), out=c_t)
            before = c_t
        r = torch.addcmul(reset, v_reset, earlier(c, c0, keep)).sigmoid_()
        ctx.save_for_backward(u, f, r, x, c, v_forget, v_reset, c0, keep)
        return torch.lerp(x, c, r), before.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, dh, dc_last):
        u, f, r, x, c, v_forget, v_reset, c0, keep = ctx.saved_tensors
        past = earlier(c, c0, keep)
        dc = dh * r
        dx = dh - dc
        d_reset = through_sigmoid((c - x).mul_(dh), r)
        slope = through_sigmoid(past - u, f)  # of c_t in F_t
        step = torch.addcmul(f, v_forget, slope)  # of c_t in c_{t-1}
        by_reset = v_reset.expand_as(c)  # of r_t's input in c_{t-1}
        if keep is not None:
            step, by_reset = step.mul_(keep), by_reset * keep
        dc[:-1].addcmul_(by_reset[1:], d_reset[1:])
        dc[-1] += dc_last
        rows = dc.unbind()
        for t, step_t in reversed(list(enumerate(step.unbind()))[1:]):
            rows[t - 1].addcmul_(step_t, rows[t])
        d_forget = slope.mul_(dc)
        dc0 = (step[0] * dc[0]).addcmul_(by_reset[0], d_reset[0])
        du = torch.addcmul(dc, dc, f, value=-1)
        return du, d_forget, d_reset, dx, over_rows(d_forget * past), over_rows(d_reset * past), dc0, None


def through_sigmoid(gradient: Tensor, y: Tensor) -> Tensor:
    """gradient y (1 - y), in one pass."""
    return torch.ops.aten.sigmoid_backward(gradient, y)


def over_rows(x: Tensor) -> Tensor:
    """(T,B,D) -> (D): the sum, as a product, which is several times as fast."""
    rows = x.flatten(0, 1)
    return torch.mv(rows.t(), rows.new_ones(len(rows)))


def earlier(c: Tensor, c0: Tensor, keep: Tensor | None) -> Tensor:
    """c_{t-1} as step t sees it."""
    past = torch.cat([c0[None], c[:-1]])
    return past if keep is None else past.mul_(keep)
