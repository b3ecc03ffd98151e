"""One memory of a whole sentence, which linear attention without an order of tokens reads: the encoder's attention to itself, and
the decoder's to the encoder."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...autograd import without_autocast
from ...errors import Mistake
from ...feature_maps import wide
from ...ops.dispatch import attend_to_source
from ...ops.kernels.launch import has_kernels
from ...ops.normalisation import EPS, divide
from ..base import check_heads, join_heads, split_heads
from .features import FEATURE_OPTIONS, build_feature_map, check_feature_norm, normalised_features, row_map_of, with_common_scale


class Source(NamedTuple):
    """The memories that decoding keeps of B sentences, each with ``beam`` hypotheses in neighbouring rows."""

    memory: Tensor  # (B,H,K,V)
    normaliser: Tensor | None  # (B,H,K)
    beam: int = 1

    def index_select(self, order: Tensor) -> Source:
        """Returns the memories of the hypotheses ``order``. They stay shared while each sentence keeps its own hypotheses;
        otherwise each hypothesis gets its own copy."""
        sentences = order // self.beam
        if len(order) % self.beam == 0 and (grouped := sentences.view(-1, self.beam)).eq(grouped[:, :1]).all():
            sentences, beam = grouped[:, 0], self.beam
            if len(sentences) == len(self.memory) and sentences.equal(torch.arange(len(sentences), device=order.device)):
                return self
        else:
            beam = 1
        normaliser = None if self.normaliser is None else self.normaliser.index_select(0, sentences)
        return Source(self.memory.index_select(0, sentences), normaliser, beam)


class SourceMemory(nn.Module):
    """y_t = phi(q_t)^T W / phi(q_t).n with W = sum_s phi(k_s) v_s^T and n = sum_s phi(k_s) over the source's S positions.

    W and n have one size, whatever the length of the source, and are accumulated in fp32. If features can be negative, there is no
    n, and W is a mean over the source. ``name``: the part of the model that a refused number of heads names.
    """

    options = FEATURE_OPTIONS  # and those of the chosen map

    def __init__(self, embed_dim: int, num_heads: int, config: Any, source_dim: int | None = None, name: str = "encoder") -> None:
        super().__init__()
        check_heads(embed_dim, num_heads, name)
        self.num_heads, self.head_dim, self.feature_norm = num_heads, embed_dim // num_heads, str(config.feature_norm)
        self.feature_map = build_feature_map(config, self.head_dim, num_heads)
        check_feature_norm(config, self.feature_map)
        key_size = num_heads * self.feature_map.head_dim
        self.sizes = [key_size, embed_dim]
        self.q_proj = nn.Linear(embed_dim, key_size)
        self.kv_proj = nn.Linear(source_dim or embed_dim, sum(self.sizes))
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for weight in (self.q_proj.weight, *self.kv_proj.weight.split(self.sizes)):
            nn.init.xavier_uniform_(weight, gain=1 / math.sqrt(2))
        nn.init.xavier_uniform_(self.out_proj.weight)
        for projection in (self.q_proj, self.kv_proj, self.out_proj):
            nn.init.zeros_(projection.bias)

    def attend(self, query: Tensor, source: Tensor, padding_mask: Tensor | None) -> Tensor:
        """Returns the values that queries (T,B,C) read from a source (S,B,C')."""
        phi = self.feature_map
        row_map = row_map_of(phi, self.feature_norm) if phi.non_negative else None
        queries, (keys, values), y = self.q_proj(query), self.project(source), None
        if row_map is not None and has_kernels(query):
            q, k, v = (split_heads(x, self.num_heads) for x in (queries, keys, values))
            y = attend_to_source(phi.linear(q), phi.linear(k), v, padding_mask, row_map, phi.eps, max(phi.eps, EPS))
        if y is None:
            y = self.read_rows(queries, self.write_rows(keys, values, padding_mask))
        return join_heads(y.to(query.dtype))

    def summarise(self, source: Tensor, padding_mask: Tensor | None) -> Source:
        """Returns the memory and the normaliser of a source (S,B,C')."""
        return self.write_rows(*self.project(source), padding_mask)

    def project(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of keys and of values, (S,B,...)."""
        if len(source) == 0:
            raise Mistake("the source was let go after the first step of decoding; decode on with the same incremental state")
        keys, values = self.kv_proj(source).split(self.sizes, dim=-1)
        return keys, values

    def write_rows(self, keys: Tensor, values: Tensor, padding_mask: Tensor | None) -> Source:
        """The same of projected rows."""
        (k, log_scale), v = self.features(keys), wide(split_heads(values, self.num_heads))
        if log_scale is not None and padding_mask is not None:
            log_scale = log_scale.masked_fill(padding_mask[:, None], -torch.inf)
        k = with_common_scale(k, log_scale)
        if padding_mask is not None:
            k, v = (x.masked_fill(padding_mask[:, None, :, None], 0) for x in (k, v))
        with without_autocast(k.device.type):
            memory = k.mT @ v
        if self.feature_map.non_negative:
            return Source(memory, k.sum(2))
        count = len(keys) if padding_mask is None else (~padding_mask).sum(1)[:, None, None, None]
        return Source(memory / count, None)

    def read(self, query: Tensor, source: Source) -> Tensor:
        """Returns the values that the queries read. Hypotheses of one sentence share its memory, so they count as more
        positions."""
        rows = query.unflatten(1, (-1, source.beam)).transpose(1, 2)  # (T,beam,B,C)
        y = join_heads(self.read_rows(self.q_proj(rows.flatten(0, 1)), source).to(query.dtype))  # (T*beam,B,C)
        return y.unflatten(0, rows.shape[:2]).transpose(1, 2).flatten(1, 2)

    def read_rows(self, queries: Tensor, source: Source) -> Tensor:
        """(B,H,T,V) of projected rows (T,B,...), one for each memory."""
        q, _ = self.features(queries)
        with without_autocast(q.device.type):
            y = q @ source.memory
            return y if source.normaliser is None else divide(y, q @ source.normaliser.unsqueeze(-1), self.feature_map.eps)

    def features(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Maps (T,B,H*X) to features (B,H,T,K) in fp32 and the log of the factor divided out of each, which cancels for queries."""
        phi = self.feature_map
        features, log_scale = normalised_features(phi, self.feature_norm, split_heads(x, self.num_heads), phi.non_negative)
        return wide(features), log_scale
