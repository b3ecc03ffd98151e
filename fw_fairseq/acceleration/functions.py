"""Functions with the arguments and results of transformers' reference functions, which call ``fast_weight``, or do in place what
those copy. Where they do not know better, they return ``NotImplemented``."""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from ..autograd import needs_gradient
from ..fla.delta_rules import gated
from ..ops import FastWeightState, fast_weight


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **unused: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule, or with a log decay g for each channel of the key Kimi Delta Attention: query and key (B,T,H,K), value
    (B,T,n H,V), g (B,T,n H) or (B,T,H,K), beta (B,T,n H). As the references do, it computes in float32, or more, and divides reads
    by the root of the keys' width. Texts in one row begin and end at cu_seqlens, or where seq_idx (1,T) changes."""
    if cu_seqlens is None and seq_idx is not None:
        cu_seqlens = F.pad((seq_idx[0].diff() != 0).nonzero().squeeze(1) + 1, (1, 0))
        cu_seqlens = F.pad(cu_seqlens, (0, 1), value=seq_idx.shape[1])
    given = query.dtype
    dtype = torch.promote_types(given, torch.float32)
    query, key, value, g, beta = (x.to(dtype) for x in (query, key, value, g, beta))
    options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "cu_seqlens": cu_seqlens}
    y, memory = gated(query, key, value, g, beta, None, initial_state, output_final_state, **options)
    return y.to(given), memory


def mamba2_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    **unused: Any,
) -> Any:
    """The scan of Mamba 2: x (B,T,H,P), dt (B,T,H), A and D (H), B and C (B,T,groups,N); the state is (B,H,P,N). seq_idx (B,T):
    the number of each token's text, where there are several in a row."""
    if seq_idx is None and cu_seqlens is not None:
        return NotImplemented
    dtype = torch.promote_types(x.dtype, torch.float32)
    dt = time_steps(dt, dt_bias, dt_softplus).clamp(*dt_limit).to(dtype).transpose(1, 2)
    q, k, v = (part.to(dtype).transpose(1, 2) for part in (C, B, x))
    q, k = (part.repeat_interleave(v.shape[1] // part.shape[1], 1) for part in (q, k))
    resets = None if seq_idx is None else F.pad(seq_idx.diff(dim=1) != 0, (1, 0))
    before = None if initial_states is None else FastWeightState(initial_states.to(dtype).mT, None, None)
    y, after = fast_weight(
        q, k, v * dt.unsqueeze(-1), "retnet", {"g": (dt * A.to(dtype)[:, None]).exp()}, before, reset_mask=resets
    )
    if D is not None:
        y = y + v * D.to(dtype).view(-1, 1, D.shape[-1] if D.dim() > 1 else 1)
    y = y.transpose(1, 2).contiguous()
    return (y, cast(Tensor, after.memory).mT) if return_final_states else y


def selective_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **unused: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """The scan of Mamba 1: x, dt and the gate z (B,C,T), A (C,N), B and C (B,N,T), D (C); the state is (B,C,N). Each channel is a
    head with values of width 1. Steps take less time than chunks, but not their gradient."""
    given, dtype = x.dtype, torch.promote_types(x.dtype, torch.float32)
    dt = time_steps(dt, None if delta_bias is None else delta_bias[:, None], delta_softplus).to(dtype).unsqueeze(-1)
    q, k = (part.to(dtype).mT.unsqueeze(1).expand(-1, x.shape[1], -1, -1) for part in (C, B))
    kept = (dt * A.to(dtype)[:, None]).exp()
    backend = "auto" if needs_gradient(x, dt, A, B, C) else "recurrent"
    y, after = fast_weight(q, k, dt * x.to(dtype).unsqueeze(-1), "gla", {"f": kept}, None, backend)
    y = y.squeeze(-1)
    y = y if D is None else y + x * D[:, None]
    y = (y if z is None else y * F.silu(z)).to(given)
    return (y, cast(Tensor, after.memory).squeeze(-1)) if return_last_state else y


def state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **unused: Any,
) -> Any:
    """The scans of Mamba 1 and 2 for one token, which change the state (B,C,N) or (B,H,P,N): x, dt and z (B,C) or (B,H,P), A as a
    row of the state, B and C (B,N) or (B,groups,N). What is expanded to all channels of a head is computed once."""
    if needs_gradient(state, x, dt, A, B, C, D, dt_bias, z):
        return NotImplemented
    dtype = torch.promote_types(state.dtype, torch.float32)
    before, dt, A = state.to(dtype), narrow(dt, 2), narrow(A, 1)
    dt = time_steps(dt, None if dt_bias is None else narrow(dt_bias, 1), dt_softplus).to(dtype)
    if x.dim() == 3:
        B, C = (part.repeat_interleave(x.shape[1] // part.shape[1], 1) for part in (B, C))
    keys, query = (part.to(dtype).unsqueeze(-2) for part in (B, C))
    after = before.mul_((dt.unsqueeze(-1) * A.to(dtype)).exp()).addcmul_((dt * x).unsqueeze(-1), keys)
    if after is not state:
        state.copy_(after)
    y = (after @ query.mT).squeeze(-1)
    y = y if D is None else y + x * D
    return (y if z is None else y * F.silu(z)).to(x.dtype)


def time_steps(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Mamba's time steps from what its projection makes."""
    dt = dt if bias is None else dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def narrow(x: Tensor, first: int) -> Tensor:
    """x without the repetitions of its dimensions from the first one on, which broadcasting makes again."""
    for dim in range(first, x.dim()):
        x = x.narrow(dim, 0, 1) if x.stride(dim) == 0 else x
    return x


def convolution_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **unused: Any
) -> Any:
    """The short convolution of one token x (B,C,1) with weight (C,taps), after the ``taps`` inputs (B,C,taps) that are kept, which
    move on by one."""
    if x.shape[-1] != 1 or conv_state.shape[-1] != weight.shape[-1] or needs_gradient(x, conv_state, weight, bias):
        return NotImplemented
    conv_state.copy_(torch.cat([conv_state[..., 1:], x.to(conv_state.dtype)], -1))
    y = (conv_state.to(weight.dtype) * weight).sum(-1, keepdim=True)
    return activated(y if bias is None else y + bias[:, None], activation).to(x.dtype)


def activated(x: Tensor, name: str | None) -> Tensor:
    """x after one of transformers' activations."""
    return x if name is None else importlib.import_module("transformers.activations").ACT2FN[name](x)


def packed_convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    seq_idx: Tensor | None = None,
    **unused: Any,
) -> Any:
    """The short convolution of hidden states (B,C,T) with weight (C,taps), which does not look into another text. seq_idx (B,T) has
    the number of each token's text."""
    if seq_idx is None:
        return NotImplemented
    x = hidden_states
    y = x.new_zeros(()) if bias is None else bias[:, None]
    for back in range(weight.shape[1]):
        same = F.pad(seq_idx, (back, 0), value=-1)[:, : x.shape[2]] == seq_idx
        y = y + weight[:, -1 - back, None] * F.pad(x, (back, 0))[:, :, : x.shape[2]].masked_fill(~same[:, None], 0)
    return activated(y, activation).to(x.dtype)


def one_by_one(*, seq_idx: Tensor | None = None, **unused: Any) -> Any:
    """Several functions in one: as the reference does, it leaves them to the layer."""
    return NotImplemented if seq_idx is None else None
