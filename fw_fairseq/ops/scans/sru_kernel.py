"""The scan of simple recurrent units in kernels, ``cuda/sru.cu``; ``ops.scans.sru`` has the equations."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...autograd import call, need_kept, needs_gradient, register
from ..kernels import launch
from ..kernels.launch import TYPES, dense, why_not_run

SOURCE, UNITS, STEPS = "sru.cu", 32, 8
VIEW = np.dtype([("p", "u8"), ("stride_t", "i8"), ("stride_b", "i8")])
VIEWS = ("u", "forget", "reset", "x", "h", "c", "du", "dforget", "dreset", "dx", "dh", "padding", "resets")
POINTERS = ("v_forget", "v_reset", "first", "last", "dfirst", "dv_forget", "dv_reset", "dlast")
SIZES = ("T", "B", "D")
PARAMS = np.dtype([(n, VIEW) for n in VIEWS] + [(n, "u8") for n in POINTERS] + [(n, "i4") for n in SIZES], align=True)
NAMES = ("u", "forget", "reset", "x", "v_forget", "v_reset", "first")
INPUTS = ", ".join(f"Tensor {name}" for name in NAMES) + ", Tensor? padding, Tensor? resets"


def sru_cuda_form(
    u: Tensor, forget: Tensor, reset: Tensor, x: Tensor, v_forget: Tensor, v_reset: Tensor, first: Tensor, *masks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """u, F, R (T,B,D) of one dtype, x (T,B,D), v_f, v_r (D), first (B,D), masks (B,T) -> h in u's dtype, the last c in fp32."""
    steps = [dense(part) for part in (u, forget.to(u.dtype), reset.to(u.dtype), x)]
    wide = [part.float().contiguous() for part in (v_forget, v_reset, first)]
    h, last, _ = call("sru", *steps, *wide, *(masks or (None, None)), needs_gradient(*steps, *wide))
    return h, last


def why_not(u: Tensor, x: Tensor) -> str | None:
    """A sentence that says why ``sru_cuda_form`` cannot run on these inputs; None where it can."""
    return why_not_run(u, x)


def start(kernel: str, keep: bool, tensors: dict[str, Tensor | None]) -> None:
    """Masks are (B,T), everything else with two strides (T,B,D)."""
    u, x = tensors["u"], tensors["x"]
    assert u is not None and x is not None
    params = np.zeros((), PARAMS)
    params["T"], params["B"], params["D"] = u.shape
    for name, part in tensors.items():
        if part is None:
            continue
        if name in POINTERS:
            params[name] = part.data_ptr()
        else:
            time, batch = (1, 0) if name in ("padding", "resets") else (0, 1)
            params[name] = (part.data_ptr(), part.stride(time), part.stride(batch))
    grid = (-(-u.shape[1] * u.shape[2] // UNITS),)
    macros = defines(u.dtype, x.dtype, tensors["padding"] is not None, tensors["resets"] is not None, keep)
    launch.current()(SOURCE, kernel, macros, grid, (UNITS,), params, 0, u.device)


def defines(dtype: torch.dtype, x_dtype: torch.dtype, padding: bool, resets: bool, keep: bool) -> dict[str, object]:
    """The macros of ``cuda/sru.cu``."""
    flags = {"FW_PADDING": int(padding), "FW_RESETS": int(resets), "FW_KEEP": int(keep)}
    return {"FW_IN": TYPES[dtype], "FW_X": TYPES[x_dtype], **flags, "FW_STEPS": STEPS}


def _forward(*inputs) -> tuple[Tensor, Tensor, list[Tensor]]:
    keep = inputs[-1]
    h, last, saved = _forward_fake(*inputs)
    tensors = dict(zip((*NAMES, "padding", "resets"), inputs))
    start("sru_forward", keep, tensors | dict(h=h, last=last, c=saved[0] if keep else None))
    return h, last, saved


def _forward_fake(*inputs) -> tuple[Tensor, Tensor, list[Tensor]]:
    u, first = inputs[0], inputs[6]
    return u.new_empty(u.shape), torch.empty_like(first), [first.new_empty(u.shape)] if inputs[-1] else []


def _backward(*inputs) -> list[Tensor]:
    c, dh, dlast = inputs[9:]
    tensors = dict(zip((*NAMES, "padding", "resets"), inputs)) | dict(c=c, dh=dh, dlast=dlast, last=c[-1])
    outputs = dict(zip(("du", "dforget", "dreset", "dx", "dv_forget", "dv_reset", "dfirst"), _backward_fake(*inputs)))
    for name in ("dv_forget", "dv_reset"):
        outputs[name] = torch.empty_like(inputs[6])  # a share of each sequence
    start("sru_backward", True, tensors | outputs)
    outputs |= {name: outputs[name].sum(0) for name in ("dv_forget", "dv_reset")}
    return list(outputs.values())


def _backward_fake(*inputs) -> list[Tensor]:
    u, forget, reset, x, v_forget, v_reset, first = inputs[:7]
    return [*(part.new_empty(part.shape) for part in (u, forget, reset, x)), *map(torch.empty_like, (v_forget, v_reset, first))]


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *operands, keep = inputs
    need_kept("sru", keep)
    [c] = output[2]
    ctx.mark_non_differentiable(c)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*operands, c)


def _differentiate(ctx: Any, dh: Tensor | None, dlast: Tensor | None, _: object) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    u, *_rest, first, _padding, _resets, _c = saved
    dh = torch.zeros_like(u) if dh is None else dense(dh)
    dlast = torch.zeros_like(first) if dlast is None else dlast.contiguous()
    return *call("sru_backward", *saved, dh, dlast), None, None, None


register("sru", f"({INPUTS}, bool keep) -> (Tensor, Tensor, Tensor[])", _forward, _forward_fake, _setup_context, _differentiate)
register("sru_backward", f"({INPUTS}, Tensor c, Tensor dh, Tensor dlast) -> Tensor[]", _backward, _backward_fake)
