"""The types of the table of update rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import Mistake
from .gates import RATES


class Coefficients(NamedTuple):
    """The recurrence's coefficients over time; None stands for no decay (f, z), no erase (e) and full strength (w).

    The operation turns an e per feature into e * k and a w per value channel into a part of v. So e of (B,H,T,K) is, for every form
    that runs the recurrence, the key that an erase reads with.
    """

    f: Tensor | None = None  # (B,H,T) or (B,H,T,K) in (0,1]: decay of the key side
    z: Tensor | None = None  # (B,H,T,V) in (0,1]: decay of the value side
    e: Tensor | None = None  # (B,H,T) or (B,H,T,K): erase strength
    w: Tensor | None = None  # (B,H,T) or (B,H,T,V): write strength


@dataclass(frozen=True)
class Gate:
    """A gate. ``axis``: None for one number per token and head, "K" for one per feature, "V" for one per value channel.

    ``bias`` is the start of the layer's bias, from which ``form`` makes the gate: a number, "uniform" for uniform gate
    initialisation, logit(U(1/n, 1 - 1/n)) over the n gates of a layer, or a function of a ``gates.Place``. None stands for 0 in a
    new model and for "uniform" in a converted one. ``converted``: the start in a converted model where it is another, a number or
    "uniform".
    ``writes``: whether the gate itself is the strength of a write. ``erases``: whether --negative-eigenvalues doubles it.

    The rest says how a layer makes the gate of a token; the defaults are one row of its projection for each number, and a sigmoid.

    form: a name in ``gates.FORMS``.
    rank: the gate comes from so many numbers of the token, or "head" for as many as a head is wide; ``inner`` is applied to them, a
        name in ``gates.INNER``.
    of: the gate comes from another gate, or from "k", times learnt numbers.
    still: at the start the gate is that of its bias, whatever the token.
    constant: the gate is its bias, whatever the token; ``learnt`` says whether training changes it.
    decays: the gate is what is left of the memory, which --exponential-decay makes in another way.
    rates: between them exp(A) starts, in a form that has it.
    once: of the writes of one token, only the first has the gate, and the others have 1.
    """

    axis: str | None = None
    bias: float | str | Callable[..., Tensor] | None = None
    converted: float | str | None = None
    writes: bool = False
    erases: bool = False
    form: str = "sigmoid"
    rank: int | str | None = None
    inner: str = "identity"
    of: str | None = None
    still: bool = False
    constant: bool = False
    learnt: bool = True
    decays: bool = False
    rates: tuple[float, float] = RATES
    once: bool = False

    projected: bool = field(init=False)  # whether the gate is rows of the layer's projection and a sigmoid, and nothing else

    def __post_init__(self) -> None:
        projected = self.form == "sigmoid" and self.rank is None and self.of is None and not self.constant
        object.__setattr__(self, "projected", projected)

    def width(self, key_width: int, value_width: int) -> int:
        """How many numbers it has per token and head, for keys of K features and values of V channels."""
        return {None: 1, "K": key_width, "V": value_width}[self.axis]

    def shape(self, sizes: tuple[int, int, int, int, int]) -> tuple[int, ...]:
        """Its shape for sizes (B, H, T, K, V): (B,H,T), (B,H,T,K) or (B,H,T,V)."""
        return (*sizes[:3], self.width(*sizes[3:])) if self.axis else sizes[:3]


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

    A rule of the recurrence may also have, each a function of the gates by name:

    key: ``key(k, **gates)``, the key that a token writes under.
    query: ``query(q, k, **gates)``, the query that a token reads with, where k is the key before ``key``.
    removal: a key a and a key p, (B,H,T,K): before the write, a token takes a (p^T D_t) from the memory.
    bonus: u (B,H,T,K): outputs read the memory before the write, y_t = q_t^T (W_{t-1} + u_t * k_t v_t^T).
    skip: d (B,H,T): what an output takes of its own value, y_t + d_t v_t.

    several: whether a token may write several times: the operation then takes n keys, values and gates for each query, and a layer
        makes --product-steps of them. keyless: whether a layer makes no keys, so that k is 1.
    """

    equation: str
    source: str
    coefficients: Callable[..., Coefficients] | None = None
    gates: Mapping[str, Gate] = field(default_factory=dict)
    normaliser: str | None = None
    step: Callable[..., tuple[Tensor, Tensor]] | None = None
    sequence: Callable[..., tuple[Tensor, Tensor]] | None = None
    key: Callable[..., Tensor] | None = None
    query: Callable[..., Tensor] | None = None
    removal: Callable[..., tuple[Tensor, Tensor]] | None = None
    bonus: Callable[..., Tensor] | None = None
    skip: Callable[..., Tensor] | None = None
    several: bool = False
    keyless: bool = False
    # made of the others at once, because a graph that is being traced cannot compute them
    sample: Coefficients = field(init=False, repr=False, compare=False)  # for gates of 1/2; none for a rule outside the recurrence
    simple: bool = field(init=False, repr=False)  # whether the coefficients say all, with erase and write strengths per token
    erases: bool = field(init=False, repr=False)  # whether a write takes away what its key reads; False with a ``step``
    one_step: bool = field(init=False, repr=False)  # whether a token is one step of the recurrence, which it reads after its write
    only_sigmoid_gates: bool = field(init=False, repr=False)  # and one write, of a layer whose gates are rows of its projection

    def __post_init__(self) -> None:
        added = [name for name in ("key", "query", "removal", "bonus", "skip") if getattr(self, name) is not None]
        gates = {name: torch.full(gate.shape((1, 1, 1, 1, 1)), 0.5) for name, gate in self.gates.items()}
        sample = Coefficients() if self.coefficients is None else self.coefficients(**gates)
        of_channels = sample.z is not None or (sample.w is not None and sample.w.dim() == 4)
        wrong = {
            "a Rule takes either coefficients (it fits the recurrence) or step (it does not), not both": (
                (self.coefficients is None) == (self.step is None)
            ),
            f"Rule.normaliser is {self.normaliser!r}; allowed: None, 'write', 'keys'": (
                self.normaliser not in (None, "write", "keys")
            ),
            "Rule.normaliser is 'write', which has no channels, and z or w differs between value channels; use 'keys' or None": (
                self.normaliser == "write" and of_channels
            ),
            f"Rule.{'/'.join(added)} is for rules of the recurrence without a normaliser; leave it out, or leave those out": (
                added and (self.step is not None or self.normaliser is not None)
            ),
            "a Rule takes either removal or bonus, not both": self.removal is not None and self.bonus is not None,
        }
        for sentence, is_wrong in wrong.items():
            if is_wrong:
                raise Mistake(sentence)
        simple = not added and all(x is None or x.dim() == 3 for x in (sample.e, sample.w))
        made = {
            "sample": sample,
            "simple": simple,
            "erases": sample.e is not None,
            "one_step": self.removal is None and self.bonus is None,
            "only_sigmoid_gates": simple and not self.several and all(gate.projected for gate in self.gates.values()),
        }
        for name, value in made.items():
            object.__setattr__(self, name, value)
