"""The recurrences in float64, one token at a time as their equations have it, and inputs for them.

Nothing here is shared with the operation, which is one of those that are examined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

GATES: dict[str, dict[str, str | None]] = {  # of each rule, by fla's names; "K": one for each channel of the key
    "linear_attn": {},
    "retention": {},
    "simple_gla": {"g": None},
    "gla": {"g": "K"},
    "delta_rule": {"beta": None},
    "gated_delta_rule": {"g": None, "beta": None},
    "kda": {"g": "K", "beta": None},
}
GROUPED = "gated_delta_rule", "kda"  # whose values may have several heads for one of the keys
K, V = 16, 8
STATE = "initial_state"


def draw(rule: str, tokens: int, rows: int = 2, heads: int = 2, groups: int = 1, texts: int | None = None) -> dict[str, Tensor]:
    """The arguments of a function by fla's names, in float64, and a state to begin with. Decays reach from hardly any to strong."""
    made = torch.Generator().manual_seed(tokens + groups)
    many = heads * groups

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=made)

    x = {"q": F.normalize(normal(rows, tokens, heads, K), dim=-1), "k": F.normalize(normal(rows, tokens, heads, K), dim=-1)}
    x["v"] = normal(rows, tokens, many, V)
    for name, axis in GATES[rule].items():
        gate = normal(rows, tokens, many, *([K] if axis else []))
        x[name] = gate.sigmoid() if name == "beta" else -(2 * gate - 3).exp()
    x[STATE] = normal(rows if texts is None else texts, many, K, V)
    return x


def recurrence(
    rule: str, x: dict[str, Tensor], limits: Sequence[int] | None = None, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs (B,T,H,V) and last states (N,H,K,V). ``limits``: where texts in one row begin and end."""
    if limits is not None:
        parts = [
            recurrence(rule, {**part_of(x, slice(a, b)), STATE: x[STATE][n : n + 1]}, scale=scale)
            for n, (a, b) in enumerate(zip(limits, limits[1:]))
        ]
        ys, states = zip(*parts)
        return torch.cat(ys, 1), torch.cat(states)
    groups = x["v"].shape[2] // x["k"].shape[2]
    q, k = (x[name].repeat_interleave(groups, 2) for name in ("q", "k"))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    W, outputs = x[STATE], []
    constant = (
        torch.tensor([math.log(1 - 2.0 ** (-5 - h)) for h in range(W.shape[1])], dtype=W.dtype) if rule == "retention" else None
    )
    for t in range(q.shape[1]):
        log: Any = constant if "g" not in x else x["g"][:, t]
        if log is not None:
            W = W * log.exp().reshape(*W.shape[:2], -1, 1) if log.dim() > 1 else W * log.exp()[:, None, None]
        value = x["v"][:, t]
        if "beta" in x:
            value = x["beta"][:, t, :, None] * (value - (k[:, t, :, :, None] * W).sum(-2))
        W = W + k[:, t, :, :, None] * value[:, :, None]
        outputs.append((q[:, t, :, :, None] * W).sum(-2))
    return (torch.stack(outputs, 1) if outputs else x["v"]), W


def part_of(x: dict[str, Tensor], tokens: slice) -> dict[str, Tensor]:
    """The same for some of the tokens."""
    return {name: tensor if name == STATE else tensor[:, tokens] for name, tensor in x.items()}
