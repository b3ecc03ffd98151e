"""Functions with the names, shapes and arguments of flash-linear-attention's that the operation computes, on a CPU and without
Triton (docs/fla.md)."""

from .delta_rules import delta_rule, fused_recurrent_gated_delta_rule, fused_recurrent_kda, gated
from .functions import (
    chunk_gla,
    chunk_linear_attn,
    fused_recurrent_gla,
    fused_recurrent_linear_attn,
    hgrn,
    retention,
    rwkv6,
    simple_gla,
)

chunk_gated_delta_rule = chunk_gdn = chunk_kda = gated
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
chunk_delta_rule = fused_recurrent_delta_rule = delta_rule
chunk_simple_gla = fused_chunk_simple_gla = fused_recurrent_simple_gla = simple_gla
chunk_retention = fused_chunk_retention = fused_recurrent_retention = retention
chunk_rwkv6 = fused_recurrent_rwkv6 = rwkv6
chunk_hgrn = fused_recurrent_hgrn = hgrn
fused_chunk_linear_attn = chunk_linear_attn

__all__ = [
    "chunk_delta_rule",
    "chunk_gated_delta_rule",
    "chunk_gdn",
    "chunk_gla",
    "chunk_hgrn",
    "chunk_kda",
    "chunk_linear_attn",
    "chunk_retention",
    "chunk_rwkv6",
    "chunk_simple_gla",
    "fused_chunk_linear_attn",
    "fused_chunk_retention",
    "fused_chunk_simple_gla",
    "fused_recurrent_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_gdn",
    "fused_recurrent_gla",
    "fused_recurrent_hgrn",
    "fused_recurrent_kda",
    "fused_recurrent_linear_attn",
    "fused_recurrent_retention",
    "fused_recurrent_rwkv6",
    "fused_recurrent_simple_gla",
]
