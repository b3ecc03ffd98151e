"""Update rules: each maps its gates to the coefficients of one recurrence.

With W the memory (K, V), and D_t = (f_t z_t^T) * W_{t-1} the part of it that is left after decay:

    W_t = D_t - k_t ((e_t * k_t)^T D_t) + k_t (w_t * v_t)^T      (write)
    y_t = W_t^T q_t                                              (read, after the write)

A rule that fits is one entry in ``RULES``: the step form, the chunk form, decoding, states, gradients, padding, several workers,
the tests and the benchmark all read this table. Kernels run it where they know its coefficients; elsewhere PyTorch does.
Coefficients with both z and e run one token at a time. An entry may also write under another key than it removes, write several
times for one read, or read before it writes (``Rule``). A rule that does not fit has a ``step`` of its own, and a ``sequence`` if
there is a faster way to run many tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import Tensor

from . import gates
from .fwm import fwm_sequence, fwm_step
from .rule import Coefficients, Gate, Rule

__all__ = ["RULES", "Coefficients", "Gate", "Rule", "exponential"]

HALF = Gate(writes=True, erases=True)  # starts near 1/2
SMALL = Gate(converted=-5.0, writes=True, erases=True)  # near 1/2, or 0.007 in a converted model (Mao 2022)
KEPT = Gate(bias=gates.kept, converted="uniform", decays=True)
KIMI = Gate("K", gates.time_steps, form="kept_softplus", rank="head")
SLOWEST_7 = math.exp(-0.5)  # RWKV 7 decays by at most exp of minus this


def exponential(gate: Gate) -> Gate:
    """The gate as exp(-exp(A) softplus(x + b)), with a number A of its head, in place of a sigmoid (Gated DeltaNet)."""
    return replace(gate, bias=gates.time_steps, form="kept_softplus", rates=gates.ALL_RATES)


def of_removal(s: Tensor, c: Tensor, kappa: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """RWKV 7 reads what it removes before decay: kappa^T W_{t-1} is (kappa / f)^T D_t."""
    return c * kappa, kappa * (SLOWEST_7 * s).exp()


def of_comba(s: Tensor, beta: Tensor, b: Tensor, d: Tensor) -> Coefficients:
    """Comba too reads what it removes before decay. exp(-40) is nothing beside a write, in float64 either."""
    s = s.clamp(max=40.0)
    return Coefficients(f=(-s).exp(), e=b * beta * s.exp(), w=beta)


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
        gates={"g": Gate(decays=True)},
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
        gates={"f": Gate("K", "uniform", decays=True), "z": Gate("V", "uniform", decays=True)},
        coefficients=lambda f, z: Coefficients(f=f, z=z),
    ),
    "gated_delta": Rule(
        equation="W_t = g_t W_{t-1} + beta_t k_t (v_t - g_t W_{t-1}^T k_t)^T",
        source="Yang et al. 2024 (Gated DeltaNet)",
        gates={"g": KEPT, "beta": SMALL},
        coefficients=lambda g, beta: Coefficients(f=g, e=beta, w=beta),
    ),
    "fwm": Rule(
        equation="W' = W_{t-1} + beta_t k_t (v_t - W_{t-1}^T k_t)^T; W_t = W' / max(|W'|, 1); y_t = LayerNorm(W_t^T q_t)",
        source="Schlag et al. 2021, sec. 6.1.2 (Fast Weight Memory)",
        gates={"beta": Gate(writes=True)},
        step=fwm_step,
        sequence=fwm_sequence,
    ),
    "retnet": Rule(
        equation="W_t = g W_{t-1} + k_t v_t^T, g = 1 - 2^(-5-h) in head h",
        source="Sun et al. 2023 (RetNet)",
        gates={"g": Gate(bias=gates.retention, form="identity", constant=True, learnt=False)},
        coefficients=lambda g: Coefficients(f=g),
    ),
    "gla": Rule(
        equation="W_t = f_t * W_{t-1} + k_t v_t^T",
        source="Yang et al. 2023 (gated linear attention)",
        gates={"f": Gate("K", form="root16", rank=16)},
        coefficients=lambda f: Coefficients(f=f),
    ),
    "mamba2": Rule(
        equation="W_t = g_t W_{t-1} + s_t k_t v_t^T; y_t = W_t^T q_t + d v_t",
        source="Dao & Gu 2024 (Mamba 2)",
        gates={
            "s": Gate(bias=gates.time_steps, form="softplus", writes=True),
            "g": Gate(of="s", form="kept"),
            "d": Gate(bias=gates.ones, form="identity", constant=True),
        },
        coefficients=lambda s, g, d: Coefficients(f=g, w=s),
        skip=lambda s, g, d: d,
    ),
    "hgrn2": Rule(
        equation="W_t = f_t * W_{t-1} + ((1 - f_t) * k_t) v_t^T, k_t = 1 in a layer",
        source="Qin et al. 2024 (HGRN 2)",
        gates={"f": Gate("K", gates.bounds, form="bounded")},
        coefficients=lambda f: Coefficients(f=f),
        key=lambda k, f: (1 - f) * k,
        keyless=True,
    ),
    "rwkv6": Rule(
        equation="y_t = (W_{t-1} + u * k_t v_t^T)^T q_t; W_t = f_t * W_{t-1} + k_t v_t^T",
        source="Peng et al. 2024 (RWKV 6)",
        gates={
            "f": Gate("K", gates.decay_6, form="exponent", rank=64, inner="tanh", still=True),
            "u": Gate("K", gates.bonus_6, form="identity", constant=True),
        },
        coefficients=lambda f, u: Coefficients(f=f),
        bonus=lambda f, u: u,
    ),
    "rwkv7": Rule(
        equation="W_t = exp(-e^(-1/2) s_t) * W_{t-1} - (c_t * kappa_t) (kappa_t^T W_{t-1}) + (k_t * (1 + (c_t - 1) * a)) v_t^T",
        source="Peng et al. 2025 (RWKV 7)",
        gates={
            "s": Gate("K", gates.decay_7, rank=64, inner="tanh", still=True),
            "c": Gate("K", gates.removal_7, rank=64, still=True, erases=True),
            "kappa": Gate("K", gates.key_7, of="k", form="unit"),
            "a": Gate("K", gates.written_7, form="identity", constant=True),
        },
        coefficients=lambda s, c, kappa, a: Coefficients(f=(-SLOWEST_7 * s).exp()),
        key=lambda k, s, c, kappa, a: k * (1 + (c - 1) * a),
        removal=of_removal,
    ),
    "kda": Rule(
        equation="D_t = f_t * W_{t-1}; W_t = D_t + beta_t k_t (v_t - D_t^T k_t)^T",
        source="Kimi Team 2025 (Kimi Delta Attention)",
        gates={"f": KIMI, "beta": HALF},
        coefficients=lambda f, beta: Coefficients(f=f, e=beta, w=beta),
    ),
    "gdn2": Rule(
        equation="D_t = f_t * W_{t-1}; W_t = D_t - k_t ((b_t * k_t)^T D_t) + k_t (w_t * v_t)^T",
        source="Hatamizadeh et al. 2026 (Gated DeltaNet 2)",
        gates={"f": KIMI, "b": Gate("K", erases=True), "w": Gate("V", writes=True)},
        coefficients=lambda f, b, w: Coefficients(f=f, e=b, w=w),
    ),
    "comba": Rule(
        equation="W_t = exp(-s_t) W_{t-1} + beta_t k_t (v_t - b W_{t-1}^T k_t)^T; y_t = W_t^T (q_t - d k_t)",
        source="Hu et al. 2025 (Comba)",
        gates={
            "s": Gate(bias=gates.time_steps, form="softplus_of_rate", rates=gates.ALL_RATES),
            "beta": HALF,
            "b": Gate(bias=gates.ones, constant=True),
            "d": Gate(bias=gates.ones, form="identity", constant=True),
        },
        coefficients=of_comba,
        query=lambda q, k, s, beta, b, d: q - d.unsqueeze(-1) * k,
    ),
    "delta_product": Rule(
        equation="W_t = W_{t-1} + beta_t k_t (v_t - W_{t-1}^T k_t)^T, n times for each read",
        source="Siems et al. 2025 (DeltaProduct)",
        gates={"beta": HALF},
        coefficients=lambda beta: Coefficients(e=beta, w=beta),
        several=True,
    ),
    "gated_delta_product": Rule(
        equation="W_t = g_t W_{t-1} + beta_t k_t (v_t - g_t W_{t-1}^T k_t)^T, n times for each read, g_t once",
        source="Siems et al. 2025 (Gated DeltaProduct)",
        gates={"g": replace(exponential(Gate()), once=True), "beta": HALF},
        coefficients=lambda g, beta: Coefficients(f=g, e=beta, w=beta),
        several=True,
    ),
}
