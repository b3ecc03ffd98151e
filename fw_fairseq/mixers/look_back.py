"""The shared part of mixers that attend to the last tokens. It finds the tokens that each one sees, however the text was cut into
segments, and attends to them in blocks, so that memory grows with T and not with its square."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops.checks import check_tokens
from ..ops.state import tensor_state

BLOCK = 128  # the least number of queries in a block; a larger window makes larger blocks


@tensor_state
class WindowState(NamedTuple):
    """The last R tokens, as the mixer reads them."""

    memory: Tensor  # (B,R,X): the last R tokens, as the mixer reads them
    filled: Tensor  # (B,R), False where there was no token


class View(NamedTuple):
    """T tokens and the S - T tokens before them. Each token sees itself and the ``size`` tokens before it in its own text."""

    tokens: Tensor  # (B,S,X)
    total: int  # T
    size: int
    texts: Tensor | None  # (B,S): the number of its text, -1 for no token; None: all of them are one text
    places: Tensor | None  # (B,S): the place of each token, where padding takes none; None: there is no padding

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Yields the queries block by block, as a slice of T, and the keys that they may see, as a slice of S."""
        length, before = max(BLOCK, self.size), self.tokens.shape[1] - self.total
        for start in range(0, self.total, length):
            stop = min(start + length, self.total)
            yield slice(start, stop), slice(self.first_seen(before + start), before + stop)

    def first_seen(self, query: int) -> int:
        """Returns the first token that ``query`` may see, in any row."""
        if self.places is None or query <= self.size:
            return max(0, query - self.size)
        return int((self.places >= self.places[:, query, None] - self.size).long().argmax(1).min())

    def distances(self, queries: slice, keys: slice) -> Tensor:
        """Returns how many tokens back each key is, (B or 1,t,s). The number counts only where the key is seen."""
        places = torch.arange(self.tokens.shape[1], device=self.tokens.device)[None] if self.places is None else self.places
        return self.of_queries(places, queries)[..., None] - places[:, None, keys]

    def seen(self, queries: slice, keys: slice) -> Tensor:
        """Returns which keys each query sees, (B or 1,t,s)."""
        order = torch.arange(self.tokens.shape[1], device=self.tokens.device)[None]
        back = self.of_queries(order, queries)[..., None] - order[:, None, keys]
        seen = (back >= 0) & (self.distances(queries, keys) <= self.size)
        if self.texts is not None:
            texts = self.texts[:, None, keys]
            seen = seen & (texts >= 0) & (texts == self.of_queries(self.texts, queries)[..., None])
        return seen | (back == 0)  # padding sees itself, because a softmax needs at least one key

    def of_queries(self, x: Tensor, queries: slice) -> Tensor:
        """Returns the entries of x (B or 1,S) that belong to the queries."""
        return x[:, self.tokens.shape[1] - self.total :][:, queries]


def look_back(x: Tensor, state: WindowState | None, size: int, padding_mask, reset_mask) -> tuple[View, WindowState]:
    """Maps x (B,T,X) to the view of its tokens and the state after the last one. Each token sees itself and the ``size`` before it,
    of its own text."""
    batch, total = x.shape[:2]
    check_tokens("x", x, total)
    real = torch.ones(batch, total, dtype=torch.bool, device=x.device) if padding_mask is None else ~padding_mask
    texts = torch.zeros_like(real, dtype=torch.long) if reset_mask is None else reset_mask.long().cumsum(1)
    if state is not None:
        x, real = torch.cat([state.memory.to(x), x], 1), torch.cat([state.filled, real], 1)
        texts = F.pad(texts, (size, 0))
    one_text = state is None and padding_mask is None and reset_mask is None
    places = None if padding_mask is None else real.long().cumsum(1)
    view = View(x, total, size, None if one_text else texts.masked_fill(~real, -1), places)
    missing = max(0, size - x.shape[1])
    kept, filled = F.pad(x, (0, 0, missing, 0)), F.pad(real & (texts == texts[:, -1:]), (missing, 0))
    if padding_mask is None:
        return view, WindowState(kept[:, -size:].clone(), filled[:, -size:].clone())  # not views of the whole segment
    last = filled.long().argsort(dim=1, stable=True)[:, -size:]
    return view, WindowState(kept.gather(1, last[..., None].expand(-1, -1, x.shape[2])), filled.gather(1, last))


def attend(q: Tensor, k: Tensor, v: Tensor, view: View, bias: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
    """Maps q (B,H,T,D), k (B,H,S,D) and v (B,H,S,X) to (B,H,T,X). bias(some q, their distances (B or 1,t,s)) is added to the
    scores."""
    if bias is None and view.texts is None and view.total <= view.size + 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    outputs = []
    for queries, keys in view.blocks():
        part, mask = q[:, :, queries], view.seen(queries, keys)[:, None]
        if bias is not None:
            mask = bias(part, view.distances(queries, keys)).masked_fill(~mask, -torch.inf)
        outputs.append(F.scaled_dot_product_attention(part, k[:, :, keys], v[:, :, keys], attn_mask=mask))
    return torch.cat(outputs, 2)
