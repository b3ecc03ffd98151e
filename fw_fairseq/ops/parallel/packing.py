"""Packed texts: several in one row, one after the other, each with a memory of its own.

They become a few batches of texts of like length, and each batch is one call of the operation, so that every rule, form and option
takes them, and little padding is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...feature_maps import AS_IS
from ..factored import Factors
from ..inputs import Inputs
from ..state import FastWeightState, joined

PASS = 64  # tokens whose time one more pass takes


def cut(lengths: list[int]) -> list[list[int]]:
    """Returns the rows of each group of like length, so that the tokens of all passes, with padding and with PASS for each, are the
    fewest."""
    order = sorted(range(len(lengths)), key=lambda row: lengths[row])
    ends = [
        stop for stop in range(1, len(order)) if lengths[order[stop - 1]] != lengths[order[stop]]
    ]  # rows of one length stay together
    ends = [0, *ends, len(order)]
    best: list[tuple[int, int]] = [(0, 0)]  # for the rows before each end: the tokens, and where the last group starts
    for last in range(1, len(ends)):
        longest = lengths[order[ends[last] - 1]]
        best.append(min((best[first][0] + (ends[last] - ends[first]) * longest + PASS, first) for first in range(last)))
    groups, last = [], len(ends) - 1
    while last:
        first = best[last][1]
        groups.append(order[ends[first] : ends[last]])
        last = first
    return groups


class Batches:
    """The batches that texts of these limits become. An empty text is one token of padding."""

    def __init__(self, limits: list[int], device: torch.device) -> None:
        starts, lengths = torch.tensor(limits[:-1]), torch.tensor(limits).diff()
        self.groups = cut(lengths.tolist())
        places, padding, self.sizes = [], [], []
        for rows in self.groups:
            steps = torch.arange(max(1, *lengths[rows].tolist(), 1))
            padding.append(steps >= lengths[rows, None])
            places.append((starts[rows, None] + steps).masked_fill(padding[-1], 0))
            self.sizes.append(places[-1].numel())
        flat, real = torch.cat([x.flatten() for x in places]), ~torch.cat([x.flatten() for x in padding])
        back = torch.empty(limits[-1], dtype=torch.long)
        back[flat[real]] = real.nonzero().squeeze(1)
        self.as_they_are = torch.equal(flat, torch.arange(limits[-1]))
        self.places, self.back = flat.to(device), back.to(device)
        self.padding = [x.to(device) if x.any() else None for x in padding]
        self.rows = [torch.tensor(rows, device=device) for rows in self.groups]

    def split(self, x: Tensor) -> list[Tensor]:
        """A row of tokens (1,H,n T,...), with n for each of T places, as batches (B,H,n t,...)."""
        x = x.unflatten(2, (len(self.back), -1))
        x = x if self.as_they_are else x.index_select(2, self.places)
        parts = zip(x.split(self.sizes, 2), self.groups)
        return [part.unflatten(2, (len(rows), -1)).squeeze(0).transpose(0, 1).flatten(2, 3) for part, rows in parts]

    def in_a_row(self, parts: list[Tensor]) -> Tensor:
        """Batches (B,H,t,V) as a row (1,H,T,V)."""
        x = torch.cat([part.transpose(0, 1).flatten(1, 2) for part in parts], 1)
        return (x if self.as_they_are else x.index_select(1, self.back)).unsqueeze(0)


def run_packed(operation: Callable[..., Any], rule: str, inputs: Inputs, limits: list[int]) -> tuple[Tensor, FastWeightState]:
    """As ``fast_weight``, which is the operation."""
    batches, state = Batches(limits, inputs.q.device), inputs.state
    if state is not None and isinstance(state.memory, Factors):
        state = state._replace(memory=state.memory.dense())
    split, count = batches.split, len(batches.groups)
    q, k, v = map(split, (inputs.q, inputs.k, inputs.v))
    gates = {name: split(gate) for name, gate in inputs.gates.items()}
    scales = [None] * count if inputs.key_log_scale is None else split(inputs.key_log_scale)
    masks = [
        [None] * count if x is None else [y[:, 0] for y in split(x[:, None])] for x in (inputs.padding_mask, inputs.reset_mask)
    ]
    options = {
        "rule": rule,
        "backend": inputs.backend,
        "attention_norm": inputs.attention_norm,
        "eps": inputs.eps,
        "feature_map": None if inputs.row_map == AS_IS else inputs.row_map,
        "attention_norm_of": inputs.attention_norm_of,
    }
    outputs, states = [], []
    for i, (rows, added, hidden, resets) in enumerate(zip(batches.rows, batches.padding, *masks)):
        if added is not None:
            hidden, resets = added if hidden is None else hidden | added, None if resets is None else resets & ~added
        before = None if state is None else state.index_select(rows)
        given = {"state": before, "padding_mask": hidden, "key_log_scale": scales[i], "reset_mask": resets}
        y, after = operation(q[i], k[i], v[i], gates={name: gate[i] for name, gate in gates.items()}, **given, **options)
        outputs.append(y)
        states.append(after)
    return batches.in_a_row(outputs), joined(states).index_select(torch.cat(batches.rows).argsort())
