"""From the arguments that flash-linear-attention's functions share to the operation and back.

Tensors are (B,T,H,D), and gates logarithms. Keys may have fewer heads than values, each for several heads of values in a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..autograd import needs_gradient
from ..errors import Mistake
from ..feature_maps import l2_eps_normalise, wide
from ..generation.memory_loop import step
from ..ops import FastWeightState, fast_weight
from ..ops.native import takes

Result = tuple[Tensor, Any]  # outputs (B,T,H,V), and the last state or None
WITHOUT_EFFECT = {  # how fla's kernels work, not what they compute
    "cu_seqlens_cpu",
    "chunk_indices",
    "chunk_size",
    "safe_gate",
    "disable_recompute",
}
NORMALISER_EPS = 1e-10


def kept(log: Tensor) -> Tensor:
    """Returns what a log decay leaves."""
    return wide(log).exp()


def refuse_unknown(options: dict) -> None:
    """Refuses an argument that would change the result."""
    unknown = [name for name, x in options.items() if name not in WITHOUT_EFFECT and x is not None and x is not False]
    if unknown:
        raise Mistake(f"fw_fairseq.fla knows no {unknown[0]} for this function; leave it out")


def compute(
    rule: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: dict[str, Tensor],
    scale: float | None = None,
    initial_state: Any = None,
    output_final_state: bool = False,
    *,
    cu_seqlens: Tensor | None = None,
    reverse: bool = False,
    state_v_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    normalize: bool = False,
    **options: Any,
) -> Result:
    """The operation with this rule and these gates, which are no logarithms any more.

    ``scale`` multiplies queries, None for K^(-1/2). States are (N,H,K,V), or (N,H,V,K) with ``state_v_first``; N is B, or the
    number of texts that ``cu_seqlens`` packs into one row. ``reverse`` goes from the last token to the first. ``normalize`` divides
    outputs by what the queries read from the sum of keys, which is (N,1,H,K) and the second part of the state.
    """
    refuse_unknown(options)
    if use_qk_l2norm_in_kernel:
        q, k = l2_eps_normalise(q), l2_eps_normalise(k)
    shared = v.shape[2] // k.shape[2]
    if shared > 1:
        q, k = (x.repeat_interleave(shared, 2) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    backwards = reverse and cu_seqlens is not None
    if reverse:
        q, k, v, *flipped = (x.flip(1) for x in (q, k, v, *gates.values()))
        gates = dict(zip(gates, flipped))
        cu_seqlens = None if cu_seqlens is None else q.shape[1] - cu_seqlens.flip(0)
    q, k, v, *rows = (x.transpose(1, 2) for x in (q, k, v, *gates.values()))
    opened, before = dict(zip(gates, rows)), state_of(initial_state, wide(q[:0]).dtype, state_v_first, normalize, backwards)
    if q.shape[2] == 1 and before is not None and "beta" in gates and cu_seqlens is None and q.dtype == before.memory.dtype:
        y, after = one_token(q, k, v, before.memory, **opened)  # of generation: the call of the operation would take longest
    else:
        eps = NORMALISER_EPS if normalize else None
        norm: Any = {"attention_norm": normalize, "eps": eps}
        y, after = fast_weight(q, k, v, rule, opened, before, cu_seqlens=cu_seqlens, keep_state=output_final_state, **norm)
    y = y.transpose(1, 2)
    return (y.flip(1) if reverse else y), given_back(after, state_v_first, backwards) if output_final_state else None


def one_token(
    q: Tensor, k: Tensor, v: Tensor, memory: Tensor, beta: Tensor, g: Tensor | None = None, f: Tensor | None = None
) -> tuple[Tensor, FastWeightState]:
    """The step of the delta rules: q and k (B,H,1,K), v (B,H,1,V), beta and g (B,H,1), f (B,H,1,K). A compiled loop takes it where
    there is no gradient."""
    if takes(memory, q, k, v) and not needs_gradient(q, k, v, memory, beta, g, f):
        y, after = step(memory, q, k, v, g if f is None else f, None, beta, beta)
        return y, FastWeightState(after)
    if f is not None or g is not None:
        memory = memory * (g.unsqueeze(-1) if f is None else f.mT)  # type: ignore[union-attr]
    written = (v - k @ memory) * beta.unsqueeze(-1)
    memory = torch.baddbmm(memory.flatten(0, 1), k.flatten(0, 1).mT, written.flatten(0, 1)).view_as(memory)
    return q @ memory, FastWeightState(memory)


def state_of(given: Any, dtype: torch.dtype, v_first: bool, normalize: bool, backwards: bool) -> Any:
    """The operation's state for one of fla's."""
    memory, sums = given if isinstance(given, (tuple, list)) else (given, None)
    if memory is None:
        return None
    memory = memory.to(dtype)
    if normalize:
        sums = memory.new_zeros(memory.shape[:3]) if sums is None else sums.squeeze(1).to(dtype)
    parts = memory.mT if v_first else memory, sums
    return FastWeightState(*(x.flip(0) if backwards and x is not None else x for x in parts))


def given_back(state: Any, v_first: bool, backwards: bool) -> Any:
    """fla's state for one of the operation's."""
    memory, sums = (x.flip(0) if backwards and x is not None else x for x in state[:2])
    memory = memory.mT if v_first else memory
    return memory if sums is None else (memory, sums.unsqueeze(1))
