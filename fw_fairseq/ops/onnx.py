"""The recurrence as ONNX's LinearAttention and the short convolution as its CausalConvWithState, opset 27, in a model that is
traced for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import Mistake
from ..rules import Coefficients

OPSET = 27
DOMAIN = "fw_fairseq"  # of the node while torch, which knows no opset 27, writes the file


@dataclass
class Trace:
    """Whether ``torch.export`` traces for ONNX. torch.compile can read an attribute, but no ``ContextVar``."""

    on: bool = False


TRACE = Trace()


@contextlib.contextmanager
def for_onnx() -> Iterator[None]:
    """Within this block ``torch.export`` traces for ONNX, whose program goes on to ``torch.onnx.export``."""
    TRACE.on = True
    try:
        yield
    finally:
        TRACE.on = False


def onnx_form(q: Tensor, k: Tensor, v: Tensor, coefficients: Coefficients, memory: Tensor) -> tuple[Tensor, Tensor]:
    """As the forms of ``dispatch``: one node, for any number of tokens."""
    f, z, e, w = coefficients
    if z is not None or (e is not None and w is not e):
        missing = "decays values" if z is not None else "erases under another key, or by another strength, than it writes"
        raise Mistake(f"ONNX's LinearAttention has no rule that {missing}; export a model with another --update-rule")
    if e is None and w is not None:
        v = v * w.unsqueeze(-1)
    rule = {(False, False): "linear", (True, False): "gated", (False, True): "delta", (True, True): "gated_delta"}
    decay = None if f is None else f.clamp(min=torch.finfo(f.dtype).tiny).log()
    of_tokens = [None if x is None else packed(x.to(memory.dtype)) for x in (q, k, v, decay, e)]
    heads, width = q.shape[1], v.shape[3]
    y, memory = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::LinearAttention",
        (*of_tokens[:3], memory, *of_tokens[3:]),
        {"update_rule": rule[f is not None, e is not None], "q_num_heads": heads, "kv_num_heads": heads, "scale": 1.0},
        dtypes=(memory.dtype, memory.dtype),
        shapes=((*q.shape[:1], q.shape[2], heads * width), memory.shape),
        version=1,
    )
    return y.unflatten(2, (heads, width)).transpose(1, 2).to(v.dtype), memory


def onnx_convolution(x: Tensor, recent: Tensor | None, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The short convolution of ``mixers.parts.convolution`` as one node: x (T,B,C), recent (B,taps-1,C), weight (taps,C)."""
    channels, given = weight.shape[1], x.permute(1, 2, 0)
    past = given.new_zeros(x.shape[1], channels, weight.shape[0] - 1) if recent is None else recent.to(x.dtype).mT
    y, present = torch.onnx.ops.symbolic_multi_out(
        f"{DOMAIN}::CausalConvWithState",
        (given, weight.flip(0).mT.unsqueeze(1), bias, past),
        {"activation": "silu"},
        dtypes=(x.dtype, x.dtype),
        shapes=(given.shape, past.shape),
        version=1,
    )
    return y.permute(2, 0, 1), present.mT


def packed(x: Tensor) -> Tensor:
    """(B,H,T) or (B,H,T,X) -> (B,T,H) or (B,T,H X)."""
    return x.transpose(1, 2).flatten(2)
