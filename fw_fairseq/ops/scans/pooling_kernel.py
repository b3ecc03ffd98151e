"""Softmax-weighted means of the past in kernels, ``cuda/pooling.cu``; ``ops.scans.pooling`` is the operation around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...autograd import call, register
from ..kernels import launch
from ..kernels.launch import TYPES, dense, why_not_run

SOURCE, THREADS = "pooling.cu", 128
CHUNK, SHORT_CHUNKS = 16, (4, 8)  # tokens of a thread
VIEW = np.dtype([("p", "u8"), ("stride_b", "i8"), ("stride_h", "i8"), ("stride_t", "i8")])
VIEWS = ("scores", "values", "out", "out_scores", "own", "extra", "texts")
POINTERS = ("sums", "borders")
SIZES = ("B", "H", "T", "V", "window", "blocks", "chunks")
PARAMS = np.dtype([(n, VIEW) for n in VIEWS] + [(n, "u8") for n in POINTERS] + [(n, "i4") for n in SIZES], align=True)


def pool_cuda_form(scores: Tensor, values: Tensor, window: int, texts: Tensor | None) -> tuple[Tensor, Tensor]:
    """scores (B,H,T) fp32, values (B,H,T,V), texts (B,T), the number of each token's text, ->
    logs of the summed weights (B,H,T), means (B,H,T,V).

    Means are fp32 without a window, because they belong to a state then, and in the values' dtype with one.
    """
    texts = None if texts is None else texts.long()
    means, log_weights = call("pool", scores, dense(values), texts, window)
    return log_weights, means


def why_not(scores: Tensor, values: Tensor) -> str | None:
    """A sentence that says why ``pool_cuda_form`` cannot run on these inputs; None where it can."""
    return why_not_run(scores, values)


def start(
    scores: Tensor,
    values: Tensor,
    out: Tensor,
    out_scores: Tensor,
    texts: Tensor | None,
    window: int,
    own: Tensor | None = None,
    extra: Tensor | None = None,
) -> None:
    """Launches the kernels of the forward, or with ``own`` those of the backward."""
    params, (batch, heads, total, width) = np.zeros((), PARAMS), values.shape
    chunk, size = choose_chunk(window), window or total
    blocks, chunks = -(-total // size), -(-size // chunk)
    rows = batch * heads * blocks
    sums, borders = scores.new_empty(2, 2, rows * chunks if chunks > 1 else 0, 3 + width)
    tensors = dict(scores=scores, values=values, out=out, out_scores=out_scores, own=own, extra=extra)
    for name, part in tensors.items():
        if part is not None:
            params[name] = (part.data_ptr(), *part.stride()[:3])
    if texts is not None:
        params["texts"] = (texts.data_ptr(), texts.stride(0), 0, texts.stride(1))
    for name, value in dict(zip(SIZES, (batch, heads, total, width, size, blocks, chunks))).items():
        params[name] = value
    params["sums"], params["borders"] = sums.data_ptr(), borders.data_ptr()
    macros = defines(values.dtype, out.dtype, window, chunks > 1, texts is not None, own is not None)
    kernels = {"pool_chunks": rows * chunks, "pool_borders": rows} if chunks > 1 else {}
    for kernel, count in (kernels | {"pool_tokens": rows * chunks}).items():
        grid = (-(-count * width // THREADS),)
        launch.current()(SOURCE, kernel, macros, grid, (THREADS,), params, 0, values.device)


def choose_chunk(window: int) -> int:
    """The tokens of a thread."""
    return next((size for size in SHORT_CHUNKS if 0 < window <= size), CHUNK)


def defines(dtype: torch.dtype, out: torch.dtype, window: int, chunks: bool, texts: bool, backward: bool) -> dict[str, object]:
    """The macros of ``cuda/pooling.cu``."""
    flags = {"FW_WINDOW": window > 0, "FW_CHUNKS": chunks, "FW_TEXTS": texts, "FW_BACKWARD": backward}
    types = {"FW_IN": TYPES[dtype], "FW_OUT": TYPES[out], "FW_CHUNK": choose_chunk(window)}
    return types | {name: int(flag) for name, flag in flags.items()}


def by_time(values: Tensor, dtype: torch.dtype) -> Tensor:
    """An empty (B,H,T,V) tensor laid out as (T,B,H,V), which the layer reads next."""
    batch, heads, total, width = values.shape
    return values.new_empty(total, batch, heads, width, dtype=dtype).permute(1, 2, 0, 3)


def _forward(scores: Tensor, values: Tensor, texts: Tensor | None, window: int) -> tuple[Tensor, Tensor]:
    means, log_weights = _forward_fake(scores, values, texts, window)
    start(scores, values, means, log_weights, texts, window)
    return means, log_weights


def _forward_fake(scores: Tensor, values: Tensor, texts: Tensor | None, window: int) -> tuple[Tensor, Tensor]:
    return by_time(values, values.dtype if window else torch.float32), scores.new_empty(scores.shape)


def _backward(*inputs) -> tuple[Tensor, Tensor]:
    scores, values, texts, window, means, log_weights, dmeans, dlog_weights = inputs
    dvalues, erased = by_time(values, torch.float32), scores.new_empty(scores.shape)
    extra = (dmeans.float() * means).sum(-1) - dlog_weights
    start(log_weights, dmeans, dvalues, erased, texts, window, own=scores, extra=extra)
    return (values * dvalues).sum(-1) - erased, dvalues.to(values.dtype)


def _backward_fake(*inputs) -> tuple[Tensor, Tensor]:
    scores, values = inputs[:2]
    return scores.new_empty(scores.shape), by_time(values, values.dtype)


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    scores, values, texts, ctx.window = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(scores, values, texts, *output)


def _differentiate(ctx: Any, dmeans: Tensor | None, dlog_weights: Tensor | None) -> tuple[Tensor | None, ...]:
    scores, values, texts, means, log_weights = ctx.saved_tensors
    dmeans = torch.zeros_like(means) if dmeans is None else dense(dmeans)
    dlog_weights = torch.zeros_like(log_weights) if dlog_weights is None else dlog_weights
    args = (scores, values, texts, ctx.window, means, log_weights, dmeans, dlog_weights)
    return *call("pool_backward", *args), None, None


INPUTS = "Tensor scores, Tensor values, Tensor? texts, int window"
GRADIENTS = "Tensor means, Tensor log_weights, Tensor dmeans, Tensor dlog_weights"
register("pool", f"({INPUTS}) -> (Tensor, Tensor)", _forward, _forward_fake, _setup_context, _differentiate)
register("pool_backward", f"({INPUTS}, {GRADIENTS}) -> (Tensor, Tensor)", _backward, _backward_fake)
