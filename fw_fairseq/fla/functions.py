"""The functions without an erase. ``common`` and ``options`` are what they share: ``call.compute`` describes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..feature_maps import wide
from .call import Result, compute, kept


def chunk_linear_attn(q: Tensor, k: Tensor, v: Tensor, *common: Any, normalize: bool = True, **options: Any) -> Result:
    """Linear attention. With ``normalize`` a state is the memory and the sum of keys, (N,1,H,K)."""
    return compute("sum", q, k, v, {}, *common, normalize=normalize, **options)


def fused_recurrent_linear_attn(q: Tensor, k: Tensor, v: Tensor, *common: Any, normalize: bool = False, **options: Any) -> Result:
    """As ``chunk_linear_attn``, but for what it does by default."""
    return compute("sum", q, k, v, {}, *common, normalize=normalize, **options)


def simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None = None, g_gamma: Tensor | None = None, *common: Any, **options: Any
) -> Result:
    """One log decay for each token and head, g (B,T,H), or for each head, g_gamma (H)."""
    if g_gamma is not None:
        g = wide(g_gamma).expand(v.shape[:3]) + (0 if g is None else g)
    return (
        compute("sum", q, k, v, {}, *common, **options)
        if g is None
        else compute("retnet", q, k, v, {"g": kept(g)}, *common, **options)
    )


def retention(q: Tensor, k: Tensor, v: Tensor, *common: Any, **options: Any) -> Result:
    """RetNet: what head h keeps is 1 - 2^(-5-h)."""
    heads = torch.arange(v.shape[2], dtype=wide(q[:0]).dtype, device=q.device)
    return compute("retnet", q, k, v, {"g": (1 - torch.exp2(-5 - heads)).expand(v.shape[:3])}, *common, **options)


def chunk_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, *common: Any, **options: Any) -> Result:
    """Gated linear attention: a log decay for each channel of the key, g (B,T,H,K)."""
    return compute("gla", q, k, v, {"f": kept(g)}, *common, **options)


def fused_recurrent_gla(
    q: Tensor, k: Tensor, v: Tensor, gk: Tensor | None = None, gv: Tensor | None = None, *common: Any, **options: Any
) -> Result:
    """Gated linear attention with log decays for channels of the key, gk (B,T,H,K), of the value, gv (B,T,H,V), or both."""
    f = wide(torch.ones_like(k)) if gk is None else kept(gk)
    if gv is not None:
        return compute("decay", q, k, v, {"f": f, "z": kept(gv)}, *common, **options)
    rule, gates = ("sum", {}) if gk is None else ("gla", {"f": f})
    return compute(rule, q, k, v, gates, *common, **options)


def rwkv6(r: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, *common: Any, **options: Any) -> Result:
    """RWKV 6: log decays w (B,T,H,K), and for a token's own value weights u (H,K)."""
    return compute("rwkv6", r, k, v, {"f": kept(w), "u": wide(u).expand(k.shape)}, *common, **options)


def hgrn(x: Tensor, g: Tensor, initial_state: Tensor | None = None, output_final_state: bool = False, **options: Any) -> Result:
    """HGRN: h_t = exp(g_t) h_{t-1} + x_t in each channel, (B,T,D), with states (N,D)."""
    one = torch.ones_like(x[..., None, :1])
    before = None if initial_state is None else initial_state[:, None, None]
    gates = {"f": wide(one), "z": kept(g)[:, :, None]}
    y, after = compute("decay", one, one, x[:, :, None], gates, 1.0, before, output_final_state, **options)
    return y.squeeze(2), None if after is None else after[:, 0, 0]
