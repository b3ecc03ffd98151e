"""Update rules: each maps its gates to the coefficients of one recurrence.

With W the memory (K, V), and D_t = (f_t z_t^T) * W_{t-1} the part of it that is left after decay:

    W_t = D_t - e_t k_t (k_t^T D_t) + w_t k_t v_t^T          (write)
    y_t = W_t^T q_t                                          (read, after the write)

A rule that fits is one entry in ``RULES``: the step form, the chunk form, decoding, states, gradients, padding, several workers,
the tests and the benchmark all read this table. Kernels run it where they know its coefficients; elsewhere PyTorch does.
Coefficients with both z and e run one token at a time. A rule that does not fit has a ``step`` of its own, and a ``sequence`` if
there is a faster way to run many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .. import Mistake
from .fwm import fwm_sequence, fwm_step


class Coefficients(NamedTuple):
    """The recurrence's coefficients over time; None stands for no decay (f, z), no erase (e) and full strength (w)."""

    f: Tensor | None = None  # (B,H,T) or (B,H,T,K) in (0,1]: decay of the key side
    z: Tensor | None = None  # (B,H,T,V) in (0,1]: decay of the value side
    e: Tensor | None = None  # (B,H,T): erase strength
    w: Tensor | None = None  # (B,H,T): write strength


@dataclass(frozen=True)
class Gate:
    """A gate in (0,1). ``axis``: None for one number per token and head, "K" for one per feature, "V" for one per value channel.

    ``bias`` is the initial bias of the sigmoid that makes it: a number, or "uniform" for uniform gate initialisation,
    logit(U(1/n, 1 - 1/n)) over the n gates of a layer. None stands for 0 in a new model and for "uniform" in a converted one.
    ``writes``: whether the gate itself is the strength of a write.
    """

    axis: str | None = None
    bias: float | str | None = None
    writes: bool = False

    def width(self, key_width: int, value_width: int) -> int:
        """How many numbers it has per token and head, for keys of K features and values of V channels."""
        return {None: 1, "K": key_width, "V": value_width}[self.axis]

    def shape(self, sizes: tuple[int, int, int, int, int]) -> tuple[int, ...]:
        """Its shape for sizes (B, H, T, K, V): (B,H,T), (B,H,T,K) or (B,H,T,V)."""
        return (*sizes[:3], self.width(*sizes[3:])) if self.axis else sizes[:3]


OPERANDS = ("q", "k", "v", "memory", "padding_mask", "reset_mask")


@dataclass(frozen=True)
class Rule:
    """One update rule.

    coefficients: maps the gates, given by name, to ``Coefficients``.
    normaliser: how attention normalisation accumulates n_t: "write" follows the memory, n_t = f n_{t-1} + w k_t;
        "keys" sums the keys, n_t = n_{t-1} + k_t, and by default also divides what an erase reads, by n_{t-1}.k_t; None: not
        defined.
    step: ``step(memory, q, k, v, **gates) -> (y, memory)`` of one token, for rules outside the recurrence.
    sequence: ``sequence(q, k, v, memory, padding_mask, reset_mask, **gates) -> (y, memory)`` of all tokens, equal to ``step`` one
        by one. Padding leaves the memory unchanged (q, k and v are 0 there), and a reset empties it first.
    """

    equation: str
    source: str
    coefficients: Callable[..., Coefficients] | None = None
    gates: Mapping[str, Gate] = field(default_factory=dict)
    normaliser: str | None = None
    step: Callable[..., tuple[Tensor, Tensor]] | None = None
    sequence: Callable[..., tuple[Tensor, Tensor]] | None = None

    def __post_init__(self):
        if (self.coefficients is None) == (self.step is None):
            raise Mistake("a Rule takes either coefficients (it fits the recurrence) or step (it does not), not both")
        if self.sequence is not None and self.step is None:
            raise Mistake("Rule.sequence is a faster way to run step, and there is none; give step too")
        if taken := [name for name in self.gates if name in OPERANDS]:
            raise Mistake(f"Rule.gates has {taken[0]!r}, which is an argument already; taken are: {', '.join(OPERANDS)}")
        if self.normaliser not in (None, "write", "keys"):
            raise Mistake(f"Rule.normaliser is {self.normaliser!r}; allowed: None, 'write', 'keys'")

    @property
    def erases(self) -> bool:
        """Whether a write takes away what its key reads, which diverges with keys longer than 1. False with a ``step``."""
        if self.coefficients is None:
            return False
        gates = {name: torch.full(gate.shape((1, 1, 1, 1, 1)), 0.5) for name, gate in self.gates.items()}
        return self.coefficients(**gates).e is not None


SCALAR = Gate()
SMALL = Gate(bias=-5.0, writes=True)  # starts near 0.007
RULES: dict[str, Rule] = {
    "sum": Rule(
        equation="W_t = W_{t-1} + k_t v_t^T",
        source="Schlag et al. 2021, eq. 17; Katharopoulos et al. 2020",
        coefficients=lambda: Coefficients(),
        normaliser="write",
    ),
    "gated": Rule(
        equation="W_t = g_t W_{t-1} + (1 - g_t) k_t v_t^T",
        source="Peng et al. 2021; Mao 2022, eq. 5",
        gates={"g": SCALAR},
        coefficients=lambda g: Coefficients(f=g, w=1 - g),
        normaliser="write",
    ),
    "delta": Rule(
        equation="W_t = W_{t-1} + beta_t k_t (v_t - W_{t-1}^T k_t)^T",
        source="Schlag et al. 2021, eq. 24",
        gates={"beta": SMALL},
        coefficients=lambda beta: Coefficients(e=beta, w=beta),
        normaliser="keys",
    ),
    "decay": Rule(
        equation="W_t = (f_t z_t^T) * W_{t-1} + k_t v_t^T",
        source="Mao 2022, eq. 7",
        gates={"f": Gate("K", "uniform"), "z": Gate("V", "uniform")},
        coefficients=lambda f, z: Coefficients(f=f, z=z),
    ),
    "gated_delta": Rule(
        equation="W_t = g_t W_{t-1} + beta_t k_t (v_t - g_t W_{t-1}^T k_t)^T",
        source="Yang et al. 2024 (Gated DeltaNet)",
        gates={"g": SCALAR, "beta": SMALL},
        coefficients=lambda g, beta: Coefficients(f=g, e=beta, w=beta),
    ),
    "fwm": Rule(
        equation="W' = W_{t-1} + beta_t k_t (v_t - W_{t-1}^T k_t)^T; W_t = W' / max(|W'|, 1); y_t = LayerNorm(W_t^T q_t)",
        source="Schlag et al. 2021, sec. 6.1.2 (Fast Weight Memory)",
        gates={"beta": Gate(writes=True)},
        step=fwm_step,
        sequence=fwm_sequence,
    ),
}
