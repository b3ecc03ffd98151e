"""Calls of the operation that one launch of a kernel takes as they are given: found at the first call of a kind, and kept.

A call's kind is its ``key_of``: the options, and of each tensor what the checks and the choice of a kernel look at. So a later call
of the kind is not checked again, and nothing but the coefficients is between it and the launch. Numbers in tensors, strides,
addresses, gradients and the environment are looked at in each call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..autograd import FUNCTIONS, OPERATORS, PLAIN, needs_gradient, without_autocast
from ..feature_maps import AS_IS, RowMap
from ..rules import Coefficients, Rule
from .dispatch import choose_scan
from .inputs import Inputs
from .kernels import recurrence
from .kernels.family import Divided, Operands
from .kernels.launch import why_no_map, why_not_run
from .multistep import skip, strengths_taken_in
from .normalisation import EPS
from .state import FastWeightState

FP32 = torch.float32  # of gates and memories


class Plan(NamedTuple):
    """One launch of a family of kernels."""

    rule: Rule
    family: str
    convert: bool  # whether a gate is not in fp32
    before: RowMap  # a feature map that the kernels do not take
    row_map: RowMap  # and one that they do
    eps: float
    least: float  # 0 where reads are not divided
    ends: bool


PLANS: dict[Any, Plan | None] = {}  # None for kinds of which more is to be done
STRANGE = "no plain tensor"


def key_of(q: Any, k: Any, v: Any, gates: Any, state: Any, options: tuple) -> tuple | None:
    """All that a plan depends on, for calls without masks; None where there is no plan."""
    if (gates is not None and gates.__class__ is not dict) or (state is not None and state.__class__ is not FastWeightState):
        return None
    names = () if gates is None else tuple(gates)
    given = [q, k, v, *(() if gates is None else gates.values()), *(() if state is None else state[:3])]
    kinds = [None if x is None else (x.shape, x.dtype, x.device) if x.__class__ in PLAIN else STRANGE for x in given]
    return None if STRANGE in kinds else (names, state is None, options, *kinds)


def find_plan(inputs: Inputs) -> Plan | None:
    """The launch that runs these inputs, which are checked and have no masks; None where there is none, or more to do before it."""
    rule, tokens, divided = inputs.rule, inputs.q.shape[2], inputs.attention_norm
    alone = rule.coefficients is not None and rule.one_step and inputs.k.shape[2] == tokens
    if not inputs.kernels or not alone or not 1 < tokens < recurrence.LEAST or (divided and rule.normaliser != "write"):
        return None
    if why_not_run(inputs.q, inputs.v) or (why_no_map(inputs.row_map) and rule.simple):
        return None
    precision, convert = recurrence.choose_precision(inputs.v.dtype), any([g.dtype != FP32 for g in inputs.gates.values()])
    eps, least = (inputs.eps, max(inputs.eps, EPS)) if divided else (0.0, 0.0)
    for row_map, before in ((inputs.row_map, AS_IS), (AS_IS, inputs.row_map)):
        if row_map == AS_IS or rule.simple:
            plan = Plan(rule, "", convert, before, row_map, eps, least, inputs.ends)
            with torch.no_grad(), without_autocast(inputs.q.device.type):
                q, k, v, coefficients, _ = prepared(plan, inputs.q, inputs.k, inputs.v, inputs.gates)
            divisor = Divided(eps, least, None) if divided else None
            x = Operands(q, k, v, *coefficients, None, precision, row_map, divisor)
            name, reason = choose_scan(x)
            if reason is None and recurrence.joined_decays(x) is x:
                return plan._replace(family=name)
    return None


def prepared(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Coefficients, dict[str, Tensor]]:
    """What the kernel gets: q, k, v, and the coefficients; and the gates that they are made of."""
    rule = plan.rule
    if plan.convert:
        gates = {name: gate.to(FP32) for name, gate in gates.items()}
    if plan.before != AS_IS:
        q, k = plan.before(q), plan.before(k)
    assert rule.coefficients is not None
    coefficients = rule.coefficients(**gates)
    if not rule.simple:
        q = q if rule.query is None else rule.query(q, k, **gates)
        k = k if rule.key is None else rule.key(k, **gates)
        dtype = v.dtype
        v, coefficients = strengths_taken_in(k, v, coefficients, True)
        q, k = q.to(dtype), k.to(dtype)
    return q, k, v, coefficients, gates


def run_plan(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], state: FastWeightState | None
) -> tuple[Tensor, FastWeightState]:
    """As ``fast_weight``."""
    if torch.is_autocast_enabled(q.device.type):
        with torch.autocast(q.device.type, enabled=False):
            return run_plan(plan, q, k, v, gates, state)
    own = v
    q, k, v, coefficients, gates = prepared(plan, q, k, v, gates)
    memory: Any = None if state is None else state.memory
    sums = None if state is None else state.normaliser
    rows = [x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, *coefficients[:3])]
    w = coefficients.w  # of delta rules the same tensor as e
    rows.append(rows[5] if w is coefficients.e else w if w is None or w.stride(-1) == 1 else w.contiguous())
    if state is not None:
        memory, sums = memory.contiguous(), None if sums is None else sums.contiguous()
    keep = needs_gradient(*rows, memory, sums)
    scan = FUNCTIONS["scan"] if keep else OPERATORS["scan"]
    settings = plan.eps, plan.least, plan.family, recurrence.choose_precision(v.dtype), keep, plan.ends
    y, memory, sums, _ = scan(*rows, memory, sums, *settings, *plan.row_map)
    if plan.rule.skip is not None:
        y = skip(plan.rule, gates, y, own)
    sums = sums if plan.least else None
    after: Any = None
    if plan.ends:
        after = FastWeightState(memory, sums) if state is None else state._replace(memory=memory, normaliser=sums)
    return y, after
