"""The shared part of mixers that attend to the last tokens. It finds the tokens that each one sees, however the text was cut into
segments, and attends to them in blocks, so that memory grows with T and not with its square."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..autograd import slices_of
from ..ops.checks import check_masks, check_sequences, check_tokens
from ..ops.state import tensor_state

BLOCK = 128  # the least number of queries in a block; a larger window makes larger blocks


class Reach(NamedTuple):
    """How far back tokens see: token i of each ``segment`` tokens of a text, counted from 0, sees ``memory`` + i before itself."""

    memory: int
    segment: int = 1

    @property
    def most(self) -> int:
        """The most tokens that one sees before itself; a state holds as many."""
        return self.memory + self.segment - 1

    def window(self, tokens: int) -> int:
        """How many tokens the last of so many may see, itself among them."""
        return self.memory + 1 + (tokens - 1) % self.segment


@tensor_state
class WindowState(NamedTuple):
    """The last R tokens: the layer's inputs, which the next call projects anew, so that its weights get their gradient from them
    too. While decoding, the state holds what was made of them instead, and it keeps that form afterwards."""

    memory: Tensor | None  # (B,R,X): keys and values, or what else attention reads; None where ``inputs`` are kept
    filled: Tensor  # (B,R), False where there was no token
    inputs: Tensor | None = None  # (B,R,C)
    place: Tensor | None = None  # (B): the next token's place in its segment; None: each segment has one token


class View(NamedTuple):
    """T tokens and the S - T tokens before them. Each token sees itself and tokens before it in its own text, ``most`` at most."""

    total: int  # T
    most: int
    texts: Tensor  # (B,S): the number of each token's text, -1 for padding and where there was no token
    current: Tensor  # (B,S): which tokens belong to the last text
    one_text: bool  # all of them are one text, from its beginning
    places: Tensor | None  # (B,S): the place of each token, where padding takes none; None: there is no padding
    limits: Tensor | None = None  # (B,T): how many tokens before itself each one sees; None: ``most``
    next_place: Tensor | None = None  # (B): see WindowState.place

    @property
    def before(self) -> int:
        """The number of tokens before the T."""
        return self.texts.shape[1] - self.total

    def blocks(self) -> Iterator[tuple[slice, slice]]:
        """Yields the queries block by block, as a slice of T, and the keys that they may see, as a slice of S."""
        length = max(BLOCK, self.most)
        for start in range(0, self.total, length):
            stop = min(start + length, self.total)
            yield slice(start, stop), slice(self.first_seen(self.before + start), self.before + stop)

    def first_seen(self, query: int) -> int:
        """Returns the first token that ``query`` may see, in any row."""
        if self.places is None or query <= self.most or not len(self.places):
            return max(0, query - self.most)
        return int((self.places >= self.places[:, query, None] - self.most).long().argmax(1).min())

    def distances(self, queries: slice, keys: slice) -> Tensor:
        """Returns how many tokens back each key is, (B or 1,t,s). The number counts only where the key is seen."""
        places = self.order() if self.places is None else self.places
        return self.of_queries(places, queries)[..., None] - places[:, None, keys]

    def seen(self, queries: slice, keys: slice) -> Tensor:
        """Returns which keys each query sees, (B or 1,t,s)."""
        back = self.of_queries(self.order(), queries)[..., None] - self.order()[:, None, keys]
        limits = self.most if self.limits is None else self.limits[:, queries, None]
        seen = self.distances(queries, keys) <= limits
        if not self.one_text:
            texts = self.texts[:, None, keys]
            seen = seen & (texts >= 0) & (texts == self.of_queries(self.texts, queries)[..., None])
        return torch.where(back > 0, seen, back == 0)  # padding sees itself, because a softmax needs at least one key

    def order(self) -> Tensor:
        return torch.arange(self.texts.shape[1], device=self.texts.device)[None]

    def of_queries(self, x: Tensor, queries: slice) -> Tensor:
        """Returns the entries of x (B or 1,S) that belong to the queries."""
        return x[:, self.before :][:, queries]

    def last(self, memory: Tensor | None = None, inputs: Tensor | None = None) -> WindowState:
        """Returns the state after the last token, of one of ``memory`` (B,S,X) and ``inputs`` (B,S,C)."""
        x: Any = inputs if memory is None else memory
        missing = max(0, self.most - x.shape[1])
        kept, filled = F.pad(x, (0, 0, missing, 0)), F.pad(self.current, (missing, 0))
        if self.places is None:
            kept, filled = kept[:, -self.most :].clone(), filled[:, -self.most :].clone()  # not views of the whole segment
        else:
            order = filled.long().argsort(dim=1, stable=True)[:, -self.most :]
            kept, filled = kept.gather(1, order[..., None].expand(-1, -1, x.shape[2])), filled.gather(1, order)
        return WindowState(None if memory is None else kept, filled, kept if memory is None else None, self.next_place)


def look_back(x: Tensor, state: WindowState | None, reach: Reach, padding_mask: Tensor | None, reset_mask: Tensor | None) -> View:
    """Maps x (B,T,X) and the state before it to the view of its tokens."""
    batch, total = x.shape[:2]
    check_tokens("x", x, total)
    check_masks(padding_mask, reset_mask, (batch, total))
    if state is not None:
        check_sequences(state.filled, batch)
    real = torch.ones(batch, total, dtype=torch.bool, device=x.device) if padding_mask is None else ~padding_mask
    texts = torch.zeros_like(real, dtype=torch.long) if reset_mask is None else reset_mask.long().cumsum(1)
    one_text = state is None and padding_mask is None and reset_mask is None
    limits: Any = None
    end: Any = None
    if reach.segment > 1:
        start = x.new_zeros(batch, dtype=torch.long) if state is None or state.place is None else state.place
        places, end = places_in_texts(start, total, padding_mask, reset_mask)
        limits, end = reach.memory + places % reach.segment, end % reach.segment
    if state is not None:
        real, texts = torch.cat([state.filled, real], 1), F.pad(texts, (state.filled.shape[1], 0))
    order = None if padding_mask is None else real.long().cumsum(1)
    current = real & (texts == texts[:, -1:])
    return View(total, reach.most, texts.masked_fill(~real, -1), current, one_text, order, limits, end)


def with_memory(
    view: View, x: Tensor, read: Tensor, state: WindowState | None, project: Callable[[Tensor], Tensor], decoding: bool
) -> tuple[Tensor, WindowState]:
    """Returns what attention reads of all tokens of the view, (B,S,X), and the state after the last token.

    x: the layer's inputs (B,T,C); read: what attention reads of them, (B,T,X), which is ``project(x)``.
    """
    projected = state is not None and state.memory is not None
    kept: Any = None if state is None else state.memory if projected else state.inputs
    if state is not None:
        read = torch.cat([(kept if projected else project(kept.to(x))).to(read), read], 1)
    if decoding or projected:
        return read, view.last(memory=read)
    return read, view.last(inputs=x if state is None else torch.cat([kept.to(x), x], 1))


def places_in_texts(start: Tensor, total: int, padding_mask: Tensor | None, reset_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Maps start (B) to the place of each token in its text (B,T) and the place of the next one (B). Padding takes no place."""
    real = start.new_ones(start.shape[0], total) if padding_mask is None else (~padding_mask).long()
    before = real.cumsum(1) - real
    first = -start[:, None].expand_as(before)
    if reset_mask is not None:
        first = torch.where(reset_mask, before, first).cummax(1).values
    return before - first, before[:, -1] - first[:, -1] + real[:, -1]


def attend(
    q: Tensor, k: Tensor, v: Tensor, view: View, bias: Callable[[Tensor, Tensor], Tensor] | None = None, dropout: float = 0.0
) -> Tensor:
    """Maps q (B,H,T,D), k (B,H,S,D) and v (B,H,S,X) to (B,H,T,X). bias(some q, their distances (B or 1,t,s)) is added to the
    scores; ``dropout`` is that of the weights."""
    if bias is None and view.limits is None and view.one_text and view.total <= view.most + 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
    blocks, outputs = list(view.blocks()), []
    spans = [queries for queries, _ in blocks], *[[keys for _, keys in blocks]] * 2
    for (queries, keys), *parts in zip(blocks, *map(slices_of, (q, k, v), spans)):
        mask = view.seen(queries, keys)[:, None]
        if bias is not None:
            mask = bias(parts[0], view.distances(queries, keys)).masked_fill(~mask, -torch.inf)
        q_b, k_b, v_b = parts
        outputs.append(F.scaled_dot_product_attention(q_b, k_b, v_b, attn_mask=mask, dropout_p=dropout))
    return torch.cat(outputs, 2)
