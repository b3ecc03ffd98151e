"""Cross entropy that computes the logits of a few tokens at a time, with their gradients, and never holds those of a batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion
from fairseq.models import BaseFairseqModel
from torch import Tensor, nn

from ..autograd import as_written, once_differentiable
from ..errors import Mistake


class Goal(NamedTuple):
    """The loss asks for these targets, (N), and for a share ``smoothing`` of the probability at all other words together."""

    target: Tensor
    padding: int
    smoothing: float


def sweep(
    features: Tensor, weight: Tensor, bias: Tensor | None, goal: Goal, chunk: int, scale: Tensor | None = None
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Returns the summed loss, the sum of it without smoothing, and the gradients of the loss, times ``scale``, for features (N,C),
    weight (V,C) and bias (V). Without a scale there are no gradients: None."""
    spread = goal.smoothing / (len(weight) - 1)  # over the other words, as in fairseq's label_smoothed_cross_entropy
    more = 1 - goal.smoothing - spread  # that the target has beyond it
    exact = features.dtype if features.dtype == torch.float64 else torch.float32
    loss, nll = (features.new_zeros((), dtype=exact) for _ in range(2))
    for_features: Any = None
    for_weight: Any = None
    for_bias: Any = None
    if scale is not None:
        for_features = torch.empty_like(features)
        for_weight = torch.zeros_like(weight, dtype=exact)
        for_bias = None if bias is None else torch.zeros_like(bias, dtype=exact)
    for begin in range(0, len(features), chunk):
        rows = slice(begin, begin + chunk)
        x, target = features[rows], goal.target[rows, None]
        counts = (target != goal.padding).to(exact)
        logits = F.linear(x, weight, bias).to(exact)
        wanted, top = logits.gather(1, target), logits.amax(1, keepdim=True)
        asked = more * wanted + spread * logits.sum(1, keepdim=True) if spread else wanted
        powers = logits.sub_(top).exp_()
        total = powers.sum(1, keepdim=True)
        log_total = total.log() + top
        loss += (counts * (log_total - asked)).sum()
        nll += (counts * (log_total - wanted)).sum()
        if scale is None:
            continue
        counts *= scale
        gradient = powers.mul_(counts / total)
        if spread:
            gradient.sub_(spread * counts)
        gradient.scatter_add_(1, target, -more * counts)
        if for_bias is not None:
            for_bias += gradient.sum(0)
        gradient = gradient.to(x.dtype)
        torch.mm(gradient, weight, out=for_features[rows])
        if x.dtype == exact:
            for_weight.addmm_(gradient.t(), x)
        else:
            for_weight += gradient.t() @ x
    gradients = [x if x is None else x.to(features.dtype) for x in (for_features, for_weight, for_bias)]
    return loss, nll, gradients


class ChunkedCrossEntropy(torch.autograd.Function):
    """``cross_entropy``. The forward computes the gradients too, while it has a chunk's probabilities. In fp16 they would underflow
    before the loss is scaled, so that there the backward computes the logits once more."""

    @staticmethod
    @as_written
    def forward(ctx: Any, features: Tensor, weight: Tensor, bias: Tensor | None, goal: Goal, chunk: int) -> tuple[Tensor, Tensor]:
        ctx.early, ctx.goal, ctx.chunk = any(ctx.needs_input_grad) and features.dtype != torch.float16, goal, chunk
        operands = features, weight, bias
        loss, nll, gradients = sweep(*operands, goal, chunk, features.new_ones(()) if ctx.early else None)
        ctx.save_for_backward(*(gradients if ctx.early else operands))
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    @once_differentiable
    @as_written
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.early:
            features, weight, bias = ctx.saved_tensors
            return (*sweep(features, weight, bias, ctx.goal, ctx.chunk, upstream)[2], None, None)
        return (*(x if x is None else x * upstream.to(x.dtype) for x in ctx.saved_tensors), None, None)


def cross_entropy(features: Tensor, weight: Tensor, bias: Tensor | None, goal: Goal, chunk: int) -> tuple[Tensor, Tensor]:
    """Returns the summed loss of features (N,C) under the softmax of words with these weights (V,C) and biases (V), and the loss
    without smoothing, which has no gradient."""
    operands, kind = [features, weight, bias], features.device.type
    if torch.is_autocast_enabled(kind):
        operands = [x if x is None else x.to(torch.get_autocast_dtype(kind)) for x in operands]
    return ChunkedCrossEntropy.apply(*operands, goal, chunk)


@contextlib.contextmanager
def left_out(projection: nn.Module) -> Iterator[None]:
    """The module returns its input."""
    projection.forward = lambda x: x
    try:
        yield
    finally:
        del projection.forward


def checked_chunk(value: int, find_unused_parameters: bool) -> int:
    """Returns the value of --loss-chunk, or raises if the workers need the projection to run in the model."""
    if value and find_unused_parameters:
        raise Mistake("--loss-chunk does not work with --find-unused-parameters; leave one of them out")
    return value


class InChunks(FairseqCriterion):
    """A mixin that stands before fairseq's cross entropy, plain or label-smoothed, among the bases of a class."""

    loss_chunk = 0

    def forward(self, model: BaseFairseqModel, sample: dict, reduce: bool = True) -> tuple:
        """Returns the loss, the sample size and the log of one batch."""
        if not (self.loss_chunk and reduce):
            return super().forward(model, sample, reduce)
        projection = getattr(model.decoder, "output_projection", None)
        if type(projection) is not nn.Linear:
            raise Mistake("--loss-chunk needs a plain softmax, without --adaptive-softmax-cutoff and --output-sparsity")
        with left_out(projection):
            return super().forward(model, sample, reduce)

    def compute_loss(self, model: BaseFairseqModel, net_output: tuple, sample: dict, reduce: bool = True) -> tuple[Tensor, Tensor]:
        """Returns the summed loss, and what of it is without smoothing."""
        if not (self.loss_chunk and reduce):
            return super().compute_loss(model, net_output, sample, reduce)
        features, target = net_output[0], model.get_targets(sample, net_output)
        ignored = getattr(self, "ignore_prefix_size", 0)
        features, target = features[:, ignored:].flatten(0, 1), target[:, ignored:].flatten()
        projection = model.decoder.output_projection
        goal = Goal(target, self.padding_idx, getattr(self, "eps", 0.0))
        return cross_entropy(features, projection.weight, projection.bias, goal, self.loss_chunk)
