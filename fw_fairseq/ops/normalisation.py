"""Attention normalisation: the output divided by n_t . q_t, with n_t accumulated in fp32.

Where the normaliser follows the rule's writes ("write"), it is one more column of the memory, whose value is always 1: any form
computes it with the rest, and some kernels do without the column (``run_divided``). A log scale of the keys becomes write strengths
and decays before (``scale_writes``). Where the normaliser sums the keys ("keys"), it is a cumulative sum beside the recurrence, or
two more runs of the kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..autograd import as_written
from ..rules import Coefficients
from .dispatch import choose, run, run_divided
from .inputs import READ_AND_ERASE, Inputs, fill
from .parallel.parts import chain
from .parallel.workers import by_worker
from .recurrent import step_form
from .state import FastWeightState

EPS = 1e-6
SCALED_EPS = 1e-30  # for features at most 1, whose products can be that small; fp32 holds its inverse times any value
UNIT = 4  # fp32 numbers in 16 bytes: kernels are slow on rows that are not whole units
SMALLEST_FACTOR = 1e-9  # of what a token leaves of the scale before it; a smaller one but 0 counts as this, a log of -20.7


class Sums(NamedTuple):
    """n_t of one call, from its start to ``finish``."""

    read: Tensor | None = None  # (B,H,T,1): n_t . q_t; None where n is the last column of the memory
    normaliser: Tensor | None = None  # (B,H,K): n after the last token; None likewise


def run_normalised(inputs: Inputs) -> tuple[Tensor, FastWeightState]:
    """The normalised y and the state."""
    if inputs.key_log_scale is not None:
        inputs = scale_writes(inputs, inputs.key_log_scale)
    if inputs.rule.normaliser == "write":
        found = run_divided(inputs, max(inputs.eps, EPS))
        if found is not None:
            return found
    ready, sums = start_with_keys(inputs) if inputs.rule.normaliser == "keys" else start_with_writes(inputs)
    y, memory = run(ready)
    return finish(y, memory, sums, inputs)


def finish(y: Tensor, memory: Tensor, sums: Sums, inputs: Inputs) -> tuple[Tensor, FastWeightState]:
    """The normalised y in v's dtype and the state, from the results of the recurrence for these inputs."""
    read, normaliser = sums
    if read is None:
        width = inputs.v.shape[3]
        y, read = y[..., :width], y[..., width : width + 1]
        if inputs.ends:
            memory, normaliser = memory[..., :width], memory[..., width]
    return divide(y, read, inputs.eps).to(inputs.v.dtype), inputs.state._replace(memory=memory, normaliser=normaliser)


def start_with_keys(inputs: Inputs) -> tuple[Inputs, Sums]:
    """n_t = n_{t-1} + k_t. Where ``attention_norm_of`` says so, what an erase reads is divided too: by n_{t-1} . k_t."""
    q, k, state, resets = inputs.q, inputs.k, inputs.state, inputs.reset_mask
    if inputs.group is None:
        read, recalled, normaliser = sum_keys_in_kernels(inputs) or sum_keys(q, k, state.normaliser, resets)
    else:
        read, recalled, normaliser = sum_keys_across(inputs.group, q, k, state.normaliser, resets)
    coefficients = inputs.coefficients
    if inputs.attention_norm_of == READ_AND_ERASE:
        coefficients = normalise_erase(coefficients, recalled, inputs.eps)
    inputs = inputs._replace(coefficients=coefficients)
    if inputs.v.dtype != torch.bfloat16 or not choose(inputs).is_kernel:  # a kernel's sums in fp16 could be out of range
        inputs = inputs._replace(v=inputs.v.to(state.memory.dtype))
    return inputs, Sums(read.unsqueeze(-1), normaliser)


def start_with_writes(inputs: Inputs) -> tuple[Inputs, Sums]:
    """n_t = f_t n_{t-1} + w_t k_t: the memory of a value that is always 1."""
    state, width = inputs.state, inputs.v.shape[3]
    v = inputs.v.to(state.memory.dtype)  # so that n is read in it
    if v.shape[2] == 1 and inputs.group is None and not inputs.kernels:  # a column would copy the memory for one token
        read, n = step_form(inputs.q, inputs.k, torch.ones_like(v[..., :1]), inputs.coefficients, state.normaliser.unsqueeze(-1))
        return inputs._replace(v=v), Sums(read, n.squeeze(-1))
    columns = UNIT - width % UNIT if inputs.kernels else 1  # equal ones, of which one is read
    if inputs.empty:
        memory = state.memory[..., :1].expand(-1, -1, -1, width + columns)
    else:
        memory = torch.cat([state.memory, state.normaliser.unsqueeze(-1).expand(-1, -1, -1, columns)], dim=-1)
    return inputs._replace(v=F.pad(v, (0, columns), value=1.0), state=state._replace(memory=memory)), Sums()


def scale_writes(inputs: Inputs, key_log_scale: Tensor) -> Inputs:
    """With the keys' log scale in the coefficients, and the state's log scale after the last token in the state."""
    log_scale, coefficients = inputs.state.log_scale, inputs.coefficients
    key_log_scale = key_log_scale.to(log_scale.dtype)
    left = log_left(coefficients.f, key_log_scale, inputs.reset_mask)
    if inputs.group is None:
        coefficients, last = rescale_writes(coefficients, key_log_scale, log_scale, left)
    else:
        log_scale, last = largest_scales(inputs.group, key_log_scale, log_scale, left)
        coefficients, _ = rescale_writes(coefficients, key_log_scale, log_scale, left)
    return inputs._replace(coefficients=coefficients, state=inputs.state._replace(log_scale=last), key_log_scale=None)


def divide(y: Tensor, read: Tensor, eps: float) -> Tensor:
    """y / (read + eps). Where nothing is read y is 0, and so is the quotient, with a gradient that is finite whatever eps is."""
    return y / (read + eps).masked_fill(read == 0, max(eps, EPS))


def sum_keys(q: Tensor, k: Tensor, normaliser: Tensor, reset_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """n_t . q_t and n_{t-1} . k_t (B,H,T), and the last n (B,H,K), for n_t = n_{t-1} + k_t, from 0 again at each reset."""
    k = k.to(normaliser.dtype)
    terms = torch.cat([normaliser.unsqueeze(2), k], dim=2)
    sums = terms.cumsum(2) if reset_mask is None else sum_texts(terms, F.pad(reset_mask, (1, 0)))
    before, after = sums[:, :, :-1], sums[:, :, 1:]
    if reset_mask is not None:
        before = before.masked_fill(reset_mask[:, None, :, None], 0)
    return (after * q).sum(-1), (before * k).sum(-1), after[:, :, -1].clone()  # not the others with it


def sum_keys_in_kernels(inputs: Inputs) -> tuple[Tensor, Tensor | None, Tensor] | None:
    """``sum_keys`` as two more runs of the recurrence: memories of a value that is always 1, which each token writes its key to, or
    the key before its own. The second, n_{t-1} . k_t, is left out where it is not asked for. None where no kernel runs."""
    if not inputs.kernels:  # a CPU's tokens need not make the inputs below
        return None
    resets, normaliser = inputs.reset_mask, inputs.state.normaliser
    q, k = (x.to(normaliser.dtype) for x in (inputs.q, inputs.k))
    one = normaliser.new_ones(UNIT).expand(*k.shape[:3], UNIT)  # as often as rows of whole units need it
    f = None if resets is None else fill(one[..., 0], resets, 0)
    memory = normaliser.unsqueeze(-1).expand(*normaliser.shape, UNIT)
    sums = inputs._replace(q=q, k=k, v=one, coefficients=Coefficients(f=f), state=FastWeightState(memory))
    sums = sums._replace(ends=True, half=False)  # a small divisor shows every rounding
    if not choose(sums).is_kernel:
        return None
    read, after = run(sums)
    if inputs.attention_norm_of != READ_AND_ERASE:
        return read[..., 0], None, after[..., 0]
    earlier = F.pad(k[:, :, :-1], (0, 0, 1, 0))
    recalled, _ = run(sums._replace(q=k, k=earlier if resets is None else fill(earlier, resets, 0)))
    return read[..., 0], recalled[..., 0], after[..., 0]


def sum_texts(terms: Tensor, reset_mask: Tensor) -> Tensor:
    """Sums (B,H,T,K) over the terms since the last reset, (B,T); twice as many terms at each step, none of another text."""
    text, reach, tokens = reset_mask.cumsum(1), 1, terms.shape[2]
    while reach < tokens:
        same = (text[:, reach:] == text[:, :-reach])[:, None, :, None]
        terms = terms + F.pad(torch.where(same, terms[:, :, :-reach], 0.0), (0, 0, reach, 0))
        reach *= 2
    return terms


def normalise_erase(coefficients: Coefficients, recalled: Any, eps: float) -> Coefficients:
    """With erase strengths for which an erase takes away the normalised read of k_t. A key that nothing was written under erases
    nothing."""
    empty = recalled == 0
    assert coefficients.e is not None
    e = quotient(coefficients.e, recalled.masked_fill(empty, 1.0) + eps)
    return coefficients._replace(e=torch.where(empty, 0.0, e))


class Quotient(torch.autograd.Function):
    """a / b. Autograd's own gradient of b has a / b^2, which can overflow where its product with the gradient of a / b does not."""

    @staticmethod
    @as_written
    def forward(a: Tensor, b: Tensor) -> Tensor:
        return a / b

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1], output)
        ctx.save_for_forward(inputs[1], output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        b, quotient = ctx.saved_tensors
        return gradient / b, -(gradient * quotient) / b


class TransformedQuotient(Quotient):
    """The same for ``torch.func`` and for forward mode, whose rules ``torch.compile`` does not take."""

    generate_vmap_rule = True

    @staticmethod
    def jvp(ctx: Any, da: Tensor, db: Tensor) -> Tensor:
        b, quotient = ctx.saved_tensors
        return (da - quotient * db) / b


def quotient(a: Tensor, b: Tensor) -> Tensor:
    """a / b, with the gradient of ``Quotient``."""
    return (Quotient if torch.compiler.is_compiling() else TransformedQuotient).apply(a, b)


def rescale_writes(
    coefficients: Coefficients, key_log_scale: Tensor, log_scale: Tensor, left: Tensor
) -> tuple[Coefficients, Tensor]:
    """The coefficients for keys that stand for k_t exp(key_log_scale_t), relative to m_t, the largest scale that is left, so that
    nothing overflows; and m after the last token.

    m_t sees no later token. Its changes are one more scalar gate, which with f is at most 1, and the write strength becomes
    exp(key_log_scale_t - m_t) <= 1. It carries no gradient: outputs do not depend on it.
    """
    running = running_scale(key_log_scale, left, log_scale)
    seen = running.masked_fill(running == -torch.inf, 0.0)
    before, now = running[..., :-1], seen[..., 1:]
    nothing = (before == -torch.inf) | (left == -torch.inf)
    shrink = torch.where(nothing, 1.0, (before - now).exp()).to(log_scale.dtype)
    strength = (key_log_scale - now).exp().to(log_scale.dtype)
    f = shrink if coefficients.f is None else coefficients.f * (shrink if coefficients.f.dim() == 3 else shrink.unsqueeze(-1))
    w = strength if coefficients.w is None else coefficients.w * strength
    return coefficients._replace(f=f, w=w), running[..., -1].to(log_scale.dtype)


def log_left(f: Tensor | None, key_log_scale: Tensor, reset_mask: Tensor | None) -> Tensor:
    """The log of the share of earlier writes that each token leaves, in the channel that keeps most: (B,H,T) in float64, without
    gradients."""
    if f is None:
        left = torch.zeros_like(key_log_scale, dtype=torch.float64)
    else:
        most = (f if f.dim() == 3 else f.amax(-1)).detach().double()
        left = most.clamp(min=SMALLEST_FACTOR).log().masked_fill(most == 0, -torch.inf)
    return left if reset_mask is None else left.masked_fill(reset_mask[:, None], -torch.inf)


def running_scale(key_log_scale: Tensor, left: Tensor, start: Tensor) -> Tensor:
    """m_t = max(m_{t-1} + left_t, key_log_scale_t), from m_0 = start (B,H) on: (B,H,T+1) in float64; -inf while nothing is kept."""
    scale = torch.cat([start.unsqueeze(-1), key_log_scale.detach()], dim=-1).double()
    if not scale.numel():  # an empty batch, which has no smallest scale
        return scale
    last_write, last_end = last_place(scale != -torch.inf), last_place(F.pad(left == -torch.inf, (1, 0)))
    known = scale.nan_to_num(neginf=0.0)
    left = left.masked_fill(left == -torch.inf, known.min() - known.max() - 1)  # enough for no scale to outlive its text
    lost = F.pad(left.cumsum(-1), (1, 0))
    return (lost + (scale - lost).cummax(-1).values).masked_fill(last_write < last_end, -torch.inf)


def last_place(mask: Tensor) -> Tensor:
    """The place of the last True so far along the last dimension; -1 before the first."""
    places = torch.arange(mask.shape[-1], device=mask.device)
    return torch.where(mask, places, -1).cummax(-1).values


def sum_keys_across(
    group: Any, q: Tensor, k: Tensor, normaliser: Tensor, reset_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """``sum_keys`` for the tokens of all workers: the sums at this worker's tokens, and n after the last worker's last token."""
    if reset_mask is None:
        own = k.sum(2, dtype=normaliser.dtype)
    else:
        *_, own = sum_keys(q, k, torch.zeros_like(normaliser), reset_mask)
    kept = None if reset_mask is None else (~reset_mask.any(1)).to(own.dtype)[:, None, None].expand(*own.shape[:2], 1)
    own, kept = by_worker(group, own.unsqueeze(-1), kept)
    starts, end = chain(own, kept, None, normaliser.unsqueeze(-1))
    read, recalled, _ = sum_keys(q, k, starts[:, group.rank()].squeeze(-1), reset_mask)
    return read, recalled, end.squeeze(-1)


def largest_scales(group: Any, key_log_scale: Tensor, log_scale: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
    """The value from which ``running_scale`` starts on this worker, (B,H), and its end on the last worker."""
    own = running_scale(key_log_scale, left, torch.full_like(log_scale, -torch.inf))[..., -1]
    owns, lefts = by_worker(group, own, left.sum(-1))
    scales = [log_scale.double()]
    for worker in range(group.size()):
        scales.append(torch.maximum(scales[-1] + lefts[:, worker], owns[:, worker]))
    return scales[group.rank()].to(log_scale.dtype), scales[-1].to(log_scale.dtype)
