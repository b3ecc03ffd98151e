"""The functions that erase before they write: the delta rule, the gated delta rule and Kimi Delta Attention. ``common`` and
``options`` are what all functions share: ``call.compute`` describes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import Mistake
from ..feature_maps import wide
from .call import Result, compute, kept


def delta_rule(q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None = None, *common: Any, **options: Any) -> Result:
    """The delta rule with strengths beta (B,T,H), 1 where they are None."""
    return erasing(q, k, v, None, beta, *common, **options)


def gated(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *common: Any, **options: Any) -> Result:
    """The gated delta rule with log decays g (B,T,HV), or Kimi Delta Attention with g (B,T,HV,K), for values of HV heads; strengths
    beta (B,T,HV)."""
    return erasing(q, k, v, g, beta, *common, **options)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    *common: Any,
    **options: Any,
) -> Result:
    """As ``chunk_kda``, with the arguments of the gate before the scale."""
    return erasing(q, k, v, g, beta, *common, A_log=A_log, dt_bias=dt_bias, **options)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    *common: Any,
    **options: Any,
) -> Result:
    """The gated delta rule, with log decays for each channel of the key, gk (B,T,HV,K), beside g or in its place."""
    if gk is not None and options.get("use_gate_in_kernel"):
        raise Mistake("use_gate_in_kernel makes one log decay for each head, and gk is given; leave one out")
    decay = g if gk is None else gk if g is None else gk + g.unsqueeze(-1)
    return erasing(q, k, v, decay, beta, *common, gv=gv, **options)  # no rule has gv, so it is refused


def erasing(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    *common: Any,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    **options: Any,
) -> Result:
    """Any delta rule: g is None, (B,T,HV) or (B,T,HV,K). ``use_gate_in_kernel`` makes the log decay of g, and
    ``use_beta_sigmoid_in_kernel`` the strength of beta, up to 2 with ``allow_neg_eigval``."""
    beta = wide(torch.ones_like(v[..., 0]) if beta is None else beta)
    if use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2 if allow_neg_eigval else 1)
    elif allow_neg_eigval:
        raise Mistake("allow_neg_eigval is for use_beta_sigmoid_in_kernel=True; elsewhere give a beta up to 2")
    if g is None:
        return compute("delta", q, k, v, {"beta": beta}, *common, **options)
    g = kept(log_decay(wide(g), A_log, dt_bias, lower_bound) if use_gate_in_kernel else g)
    rule, name = ("kda", "f") if g.dim() == 4 else ("gated_delta", "g")
    return compute(rule, q, k, v, {name: g, "beta": beta}, *common, **options)


def log_decay(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    """The log decay of x (B,T,HV) or (B,T,HV,K) and learnt numbers A_log, one for each head, and dt_bias, as many as x has."""
    if A_log is None and lower_bound is None:
        raise Mistake("A_log is None; use_gate_in_kernel=True needs it, or a lower_bound")
    x = x if dt_bias is None else x + dt_bias.view(x.shape[2:]).to(x.dtype)
    rate: Any = 1 if A_log is None else A_log.view(-1, *[1] * (x.dim() - 3)).to(x.dtype).exp()
    return -rate * F.softplus(x) if lower_bound is None else lower_bound * (rate * x).sigmoid()
