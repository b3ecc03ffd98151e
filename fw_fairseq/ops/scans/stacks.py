"""The state of pooling, and one token after another: a window of any length costs the same time and memory traffic for every token.

The tokens that a window of n still needs are n - 1. They lie, oldest first, in four places::

    front   aggregates: each one of the front's tokens with all that follow it in the front
    middle  tokens, of which ``ready`` has the aggregates with all that follow in the middle; a few more are made at a time
    back    tokens
    recent  two aggregates, of the middle (with ``ready``) and of the back, and then the last few tokens

A window is therefore one aggregate of the front, merged with ``recent``. A new token drops one aggregate of the front. When the
front is empty, ``ready`` is the next one, and the back the next middle. Both are complete then, because the middle loses at least
as many tokens as the back gets.

No state changes after it was returned. Rows are written behind the last one of ``back`` and ``ready``, in storage with room for
more, which older states share but do not read. Where two texts continue from one state, the second one finds by ``used`` that the
room of the back is taken, and copies it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...autograd import needs_gradient
from ..state import tensor_state
from .aggregates import CHUNK, NOTHING, mean, merge, pooled, prefix

GROUP = CHUNK - 1  # tokens that wait in ``recent``; one product takes them and an aggregate
SHORT = 2 * GROUP  # up to so many tokens, each new one is merged with all of them


@tensor_state
class PoolState(NamedTuple):
    """With a window of n, the last n - 1 tokens, in one of three forms: the tokens; or, with an empty ``recent``, the aggregates
    from each token to the last one; or stacks of both, with scores and values side by side, where aggregates have the newest first.
    Without a window, the aggregate of all past tokens. Where there was no token, the score is NOTHING.
    """

    scores: Tensor  # (B,H,R), fp32 (float64 for float64 inputs)
    values: Tensor  # (B,H,R,V)
    front: Any = None  # (B,H,n,V+1), as the next four; None in the other forms
    middle: Any = None
    ready: Any = None
    back: Any = None
    recent: Any = None
    used: Any = None  # (B): how many tokens the storage of the back has by now; all states with it share this

    def tokens(self) -> int:
        """Returns how many past tokens the state is for; 1 with window 0."""
        parts = self[2:6] if self.front is not None else ()
        return self.scores.shape[2] + sum(part.shape[2] for part in parts) + (self.recent.shape[2] - 2 if parts else 0)


def of_aggregates(scores: Tensor, values: Tensor) -> PoolState:
    """Returns the state with these aggregates, each from a token to the last one, oldest first."""
    return PoolState(scores, values, recent=nothing(scores, values, 0))


def nothing(scores: Tensor, values: Tensor, count: int) -> Tensor:
    """Returns ``count`` rows for no token."""
    rows = values.new_zeros(*scores.shape[:2], count, values.shape[3] + 1)
    rows[..., -1] = NOTHING
    return rows


def pack(a: Tensor, x: Tensor) -> Tensor:
    """Returns values and scores side by side, (B,H,n,V+1)."""
    return torch.cat([x, a[..., None]], -1)


def unpack(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scores (B,H,n) and values (B,H,n,V)."""
    return rows[..., -1], rows[..., :-1]


def aggregates(state: PoolState, kernels: bool = False) -> tuple[Tensor, Tensor]:
    """Returns the aggregate from each token to the last one, (B,H,R) and (B,H,R,V), oldest first."""
    if state.recent is None:
        if not state.scores.shape[2]:
            return state.scores, state.values
        a, x = pooled(state.scores.flip(2), state.values.flip(2), 0, None, kernels)
        return a.flip(2), x.flip(2)
    if state.front is None:
        return state[:2]
    newest = running(torch.cat([state.back, state.recent[:, :, 2:]], 2).flip(2))
    done = joined(newest, state.ready)
    last = nothing(*unpack(done), 1) if done.shape[2] == 0 else done[:, :, -1:]
    done = torch.cat([done, running(torch.cat([last, state.middle.flip(2)], 2))[:, :, 1:]], 2)
    return unpack(joined(done, state.front).flip(2))


def running(rows: Tensor) -> Tensor:
    """Returns the aggregate of the rows up to each one."""
    return pack(*prefix(*unpack(rows))) if rows.shape[2] else rows


def joined(newer: Tensor, older: Tensor) -> Tensor:
    """Returns running aggregates of both, newest first; ``older`` has those of its own tokens only."""
    if not newer.shape[2] or not older.shape[2]:
        return torch.cat([newer, older], 2)
    return torch.cat([newer, pack(*merge(*unpack(older), *unpack(newer[:, :, -1:])))], 2)


def step(a: Tensor, x: Tensor, state: PoolState, fresh: Tensor | None) -> tuple[Tensor, PoolState]:
    """Maps one token, a (B,H,1) and x (B,H,1,V), to its mean (B,H,1,V) and the next state. fresh: (B,) bool, True where a text
    begins."""
    size = state.tokens()
    if size > SHORT and fresh is None and not needs_gradient(a, x, *state) and not torch.compiler.is_compiling():
        return decode(pack(a, x), state if state.front is not None else opened(state))
    scores, values = aggregates(state)
    if fresh is not None:
        scores = scores.masked_fill(fresh[:, None, None], NOTHING)
    scores, values = merge(scores, values, a, x)
    scores, values = torch.cat([scores, a], 2), torch.cat([values, x], 2)
    return values[:, :, :1], of_aggregates(scores[:, :, 1:], values[:, :, 1:])


def opened(state: PoolState) -> PoolState:
    """Returns the same state as stacks: everything is in the front."""
    scores, values = aggregates(state)
    front, empty = pack(scores, values).flip(2), nothing(scores, values, 0)
    used = torch.zeros(len(scores), dtype=torch.long, device=scores.device)
    none = scores[:, :, :0].clone(), values[:, :, :0].clone()  # views would keep all aggregates in memory
    return PoolState(*none, front, empty, empty, empty, nothing(scores, values, 2), used)


def decode(token: Tensor, state: PoolState) -> tuple[Tensor, PoolState]:
    """Maps a token (B,H,1,V+1) to its mean (B,H,1,V) and the next state."""
    rows = torch.cat([state.front[:, :, -1:], state.recent, token], 2)
    mean = (rows[..., -1].softmax(-1)[:, :, None] @ rows)[..., :-1]
    state = state._replace(front=state.front[:, :, :-1], recent=rows[:, :, 1:])
    if state.recent.shape[2] < GROUP + 2 and state.front.shape[2]:
        return mean, state
    return mean, flushed(state)


def flushed(state: PoolState) -> PoolState:
    """Returns the state with the recent tokens in the back, and as many of the middle in ``ready``: all, if the front is empty."""
    size, left, (front, middle, ready), recent = state.tokens(), state.front.shape[2], state[2:5], state.recent
    back, used = appended(state.back, recent[:, :, 2:], state.used, min(left, size // 2 + GROUP))
    lines, nobody = [recent[:, :, :1], whole(recent[:, :, 1:])], nothing(*unpack(recent), 1)
    keep = max(0, middle.shape[2] - GROUP) if left else 0
    if middle.shape[2]:
        made = running(torch.cat([ready[:, :, -1:], middle[:, :, keep:].flip(2)], 2))
        made, end = made[:, :, min(1, ready.shape[2]) :], ready.shape[2] + middle.shape[2]
        ready = written(ready if has_room(ready, end) else roomy(ready, end), made)  # every text writes the same there
        middle = middle[:, :, :keep]
    if not left or (ready.shape[2] == 0 and 2 * back.shape[2] >= size):  # the second: half of the first front is gone
        front = front if left else ready
        middle, ready, back, used = back, nobody[:, :, :0].clone(), nobody[:, :, :0].clone(), torch.zeros_like(used)
        lines = [lines[1], nobody]
    return PoolState(*state[:2], front, middle, ready, back, torch.cat(lines, 2), used)


def whole(rows: Tensor) -> Tensor:
    """Returns the aggregate of all rows, (B,H,1,V+1)."""
    a, x = mean(*unpack(rows))
    return torch.cat([x, a[..., None]], -1)[:, :, None]


def appended(rows: Tensor, new: Tensor, used: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """Returns ``rows`` followed by ``new``, and their ``used``. Rows without room behind them, or whose room another text took,
    are copied, with ``room`` for more."""
    end = rows.shape[2] + new.shape[2]
    mine = has_room(rows, end) and bool((used == rows.shape[2]).all())
    rows = written(rows if mine else roomy(rows, end + room), new)
    return rows, used.fill_(end) if mine else torch.full_like(used, end)


def has_room(rows: Tensor, count: int) -> bool:
    """Returns whether the storage of these rows has a place for ``count`` of them, which may be written now."""
    if rows.is_inference() and not torch.is_inference_mode_enabled():
        return False
    stop = rows.storage_offset() + rows.shape[0] * rows.stride(0)
    return count * rows.shape[3] <= rows.stride(1) and stop * rows.element_size() <= rows.untyped_storage().nbytes()


def roomy(rows: Tensor, count: int) -> Tensor:
    """Returns a copy of the rows whose storage has a place for ``count`` of them."""
    copy = rows.new_empty(*rows.shape[:2], count, rows.shape[3])[:, :, : rows.shape[2]]
    return copy.copy_(rows)


def written(rows: Tensor, new: Tensor) -> Tensor:
    """Returns ``rows`` followed by ``new``, which is written behind them."""
    size = (*rows.shape[:2], rows.shape[2] + new.shape[2], rows.shape[3])
    longer = rows.as_strided(size, rows.stride(), rows.storage_offset())
    longer[:, :, rows.shape[2] :] = new
    return longer
