"""Rules whose tokens take several steps of the recurrence, or read before they write: their inputs as plain steps, and back.

``spread`` gives each of several writes a step of its own, before everything else. ``run_steps`` does the rest, after the
coefficients: strengths per channel become parts of k and v, a removal a step before the write, and a read before the write the read
of the step before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..rules import Coefficients, Rule
from .dispatch import run
from .inputs import Inputs, fill


def spread(inputs: Inputs, writes: int) -> Inputs:
    """The inputs with as many queries as keys, for so many writes of each query: those before the last one read too, which nobody
    looks at."""
    q, padding, resets = inputs.q, inputs.padding_mask, inputs.reset_mask
    q = F.pad(q.unsqueeze(3), (0, 0, writes - 1, 0)).flatten(2, 3)
    if padding is not None:
        padding = padding.repeat_interleave(writes, dim=1)
    if resets is not None:  # before the first write
        resets = F.pad(resets.unsqueeze(2), (0, writes - 1)).flatten(1)
    return stepwise(inputs)._replace(q=q, padding_mask=padding, reset_mask=resets)


def stepwise(inputs: Inputs) -> Inputs:
    """The same for the steps of one token, which are too few for a chunk."""
    few = inputs.q.shape[2] == 1 and inputs.backend == "auto" and not inputs.kernels
    return inputs._replace(backend="recurrent") if few else inputs


def run_steps(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """y (B,H,T,V) in v's dtype and the memory after the last token, for any rule of the recurrence."""
    rule, gates = inputs.rule, {name: gate.to(inputs.dtype) for name, gate in inputs.gates.items()}
    v, coefficients = strengths_taken_in(inputs.k, inputs.v, inputs.coefficients, inputs.kernels)
    ready = inputs._replace(v=v, coefficients=coefficients)
    if rule.removal is not None:
        y, memory = remove_and_write(ready, *rule.removal(**gates))
    elif rule.bonus is not None:
        y, memory = read_before(ready)
        own, w = (ready.q * rule.bonus(**gates) * ready.k).sum(-1), ready.coefficients.w
        y = y + (own if w is None else own * w).unsqueeze(-1) * ready.v
    else:
        y, memory = run(ready)
    return skip(rule, gates, y, inputs.v), memory


def skip(rule: Rule, gates: dict[str, Tensor], y: Tensor, v: Tensor) -> Tensor:
    """y with what the rule takes of a token's own value, in v's dtype."""
    return (y if rule.skip is None else y + rule.skip(**gates).unsqueeze(-1) * v).to(v.dtype)


def strengths_taken_in(k: Tensor, v: Tensor, coefficients: Coefficients, kernels: bool) -> tuple[Tensor, Coefficients]:
    """v times a w per value channel, in v's dtype for kernels, and the coefficients without it, with an e per feature as the key
    that an erase reads with."""
    e, w = coefficients.e, coefficients.w
    if e is not None and e.dim() == 4:
        coefficients = coefficients._replace(e=e * k)
    if w is not None and w.dim() == 4:
        v = (v * w).to(v.dtype) if kernels else v * w
        coefficients = coefficients._replace(w=None)
    return v, coefficients


def remove_and_write(inputs: Inputs, key: Tensor, reading: Tensor) -> tuple[Tensor, Tensor]:
    """Each token as two steps: decay and removal, then the write. Padding removes nothing."""
    q, k, v, (f, z, e, w), zeros = inputs.q, inputs.k.to(key.dtype), inputs.v, inputs.coefficients, torch.zeros_like
    key = key if inputs.padding_mask is None else fill(key, inputs.padding_mask, 0)
    if e is None:
        e = zeros(k)
    elif e.dim() == 3:
        e = e.unsqueeze(-1) * k
    f, z = (None if x is None else in_turn(x, torch.ones_like(x)) for x in (f, z))
    w = None if w is None else in_turn(torch.ones_like(w), w)
    q, k, v = in_turn(zeros(q), q), in_turn(key, k), in_turn(zeros(v), v)
    y, memory = run(stepwise(inputs)._replace(q=q, k=k, v=v, coefficients=Coefficients(f, z, in_turn(reading, e), w)))
    return y[:, :, 1::2], memory


def in_turn(first: Tensor, second: Tensor) -> Tensor:
    """Two (B,H,T,...) as one (B,H,2T,...), of which each token has one after the other."""
    return torch.stack([first, second], 3).flatten(2, 3)


def read_before(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Returns what the queries read before their tokens' writes, and the memory after the last token: the reads of the step before
    each. A step that changes nothing comes first."""
    resets = inputs.reset_mask
    if inputs.q.shape[2] == 1 and inputs.group is None:
        y = inputs.q.to(inputs.dtype) @ inputs.state.memory
        _, memory = run(inputs)
    else:
        (f, z, e, w), still = inputs.coefficients, first
        coefficients = Coefficients(still(f, 1), still(z, 1), still(e, 0), still(w, 0))
        q = F.pad(inputs.q, (0, 0, 0, 1))
        y, memory = run(inputs._replace(q=q, k=still(inputs.k, 0), v=still(inputs.v, 0), coefficients=coefficients))
        y = y[:, :, :-1]
    return y if resets is None else fill(y, resets, 0), memory


def first(x: Any, value: float) -> Any:
    """(B,H,T,...) with ``value`` before the first token."""
    return None if x is None else F.pad(x, (*(0, 0) * (x.dim() - 3), 1, 0), value=value)
