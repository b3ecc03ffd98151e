"""The keys and values of softmax attention while decoding."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Past(NamedTuple):
    """The keys and values of the tokens so far, in buffers with room for more. Nothing is copied until they are full, or until a
    second text goes on from here: the buffers then have the tokens of the first."""

    keys: Tensor  # (B,H,room,X)
    values: Tensor  # (B,H,room,X)
    length: int
    used: list[int]  # how many places of the buffers have a token, for all that share them
    hidden: Tensor | None = None  # (B,length), True at padding; None: there is none

    @classmethod
    def empty(cls, like: Tensor, room: int) -> Past:
        """Returns buffers for keys like ``like`` (B,H,T,X)."""
        keys = like.new_empty(*like.shape[:2], room, like.shape[3])
        return cls(keys, torch.empty_like(keys), 0, [0])

    def add(self, k: Tensor, v: Tensor, hidden: Tensor | None) -> Past:
        """Returns the past with more tokens, k and v (B,H,T,X). It changes the buffers in place where they have room and no
        gradient passes them."""
        stop, keys, values, used = self.length + k.shape[2], self.keys, self.values, self.used
        if torch.is_grad_enabled() and (k.requires_grad or keys.requires_grad):
            before = self.tokens()
            return Past(torch.cat([before[0], k], 2), torch.cat([before[1], v], 2), stop, [stop], self.hidden_after(k, hidden))
        if stop > keys.shape[2] or used[0] != self.length:
            keys, values, _, used, _ = Past.empty(k, 2 * stop)
            keys[:, :, : self.length], values[:, :, : self.length] = (
                self.keys[:, :, : self.length],
                self.values[:, :, : self.length],
            )
        keys[:, :, self.length : stop], values[:, :, self.length : stop] = k, v
        used[0] = stop
        return Past(keys, values, stop, used, self.hidden_after(k, hidden))

    def hidden_after(self, k: Tensor, hidden: Tensor | None) -> Tensor | None:
        """Returns which tokens are padding, with those of k."""
        if hidden is None and self.hidden is None:
            return None
        parts = [self.hidden, hidden]
        lengths = [self.length, k.shape[2]]
        none = [torch.zeros(len(k), length, dtype=torch.bool, device=k.device) for length in lengths]
        return torch.cat([zero if part is None else part for part, zero in zip(parts, none)], 1)

    def tokens(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns the keys and values of the tokens (B,H,S,X), and which of them are padding."""
        return self.keys[:, :, : self.length], self.values[:, :, : self.length], self.hidden

    def index_select(self, order: Tensor) -> Past:
        """Returns the past of the hypotheses ``order``, with its room, so that the next token is added without a copy."""
        keys, values = self.keys.index_select(0, order), self.values.index_select(0, order)
        hidden = None if self.hidden is None else self.hidden.index_select(0, order)
        return Past(keys, values, self.length, [self.length], hidden)

    @staticmethod
    def join(pasts: list[Past]) -> Past:
        """Returns the pasts of several batches as one: what is shorter gets padding in front."""
        most, rows = max(past.length for past in pasts), []
        for keys, values, hidden in (past.tokens() for past in pasts):
            more = most - keys.shape[2]
            hidden = torch.zeros(len(keys), keys.shape[2], dtype=torch.bool, device=keys.device) if hidden is None else hidden
            rows.append((F.pad(keys, (0, 0, more, 0)), F.pad(values, (0, 0, more, 0)), F.pad(hidden, (more, 0), value=True)))
        keys, values, hidden = map(torch.cat, zip(*rows))
        return Past(keys, values, most, [most], hidden)


def attend(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, causal: bool, dropout: float = 0.0, text: Tensor | None = None
) -> Tensor:
    """Maps q (B,H,T,X), k and v (B,H,S,X) to (B,H,T,X). The queries are the last T of the S tokens; hidden: (B,S), True at
    padding; text: (B,S), the number of each token's text, which sees no other."""
    total, every = q.shape[2], k.shape[2]
    if hidden is None and text is None and (not causal or total == every):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, dropout_p=dropout)
    everything = torch.ones(total, every, dtype=torch.bool, device=q.device)
    seen = everything.tril(every - total) if causal else everything
    if text is not None:
        seen = seen & text[:, None, -total:, None].eq(text[:, None, None])
    if hidden is not None:  # padding sees itself, because a softmax needs at least one key
        seen = (seen & ~hidden[:, None, None]) | (everything.tril(every - total) & everything.triu(every - total))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, dropout_p=dropout)
