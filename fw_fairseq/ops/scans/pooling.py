"""Softmax-weighted means of all past tokens or of a window of them: additive attention. Time is O(T) for every window.

    g_t = sum_l exp(a_l) x_l / sum_l exp(a_l),    l the tokens up to t, at most ``window`` of them

``aggregates`` computes the means of many tokens, and ``stacks`` those of one token after another. A segment that continues from a
state merges the means of its own tokens with the aggregates that the state has of earlier ones.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...autograd import without_autocast
from ...errors import Mistake
from ...feature_maps import wide
from ..checks import check_masks, check_tokens
from ..kernels.launch import use_kernels
from .aggregates import NOTHING, mean, merge, pooled
from .pooling_kernel import why_not
from .stacks import PoolState, aggregates, of_aggregates, step

__all__ = ["PoolState", "last_weights", "pool"]


def pool(
    scores: Tensor,
    values: Tensor,
    window: int = 0,
    state: PoolState | None = None,
    padding_mask: Tensor | None = None,
    reset_mask: Tensor | None = None,
    backend: str = "auto",
    keep_state: bool = True,
) -> tuple[Tensor, PoolState | None]:
    """The weighted means of what each token sees, (B,H,T,V) in the dtype of values, and the state after the last token.

    scores: (B,H,T), the logs of the weights; T is at least 1. values: (B,H,T,V).
    window: how many tokens each token sees, itself among them; 0 for all past tokens.
    state: the state that an earlier call with the same window returned; None before the first token.
    padding_mask: (B,T) bool. A padded token counts in no window, and its output is 0.
    reset_mask: (B,T) bool, True at the first token of a new text, which sees no token before it.
    backend: "cuda" runs the kernels, "torch" PyTorch, "auto" the kernels where they can run.
    keep_state: False where no call continues from this one; the state is then None, and what only it needs is left out.
    """
    check(scores, values, window, state)
    check_masks(padding_mask, reset_mask, (scores.shape[0], scores.shape[2]))
    with without_autocast(values.device.type):
        kernels = use_kernels(backend, values.device, partial(why_not, scores, values))
        a, x = wide(scores), values if kernels else wide(values)
        texts: Any = None
        order: Any = None
        if reset_mask is not None:
            texts = reset_mask.long().cumsum(1)
        ends = None if texts is None else texts[:, -1]
        lengths = None
        if padding_mask is not None and padding_mask.any():
            lengths, order = (~padding_mask).sum(1), padding_mask.long().argsort(dim=1, stable=True)  # real tokens first
            a, x = a.gather(2, order[:, None].expand_as(a)), x.gather(2, order[:, None, :, None].expand_as(x))
            texts = None if texts is None else texts.gather(1, order)
        if not window:
            g, state = all_of_past(a, x, state, texts, lengths, ends, kernels)
        elif state is not None and order is None and a.shape[2] == 1:
            g, state = step(a, wide(x), state, reset_mask[:, 0] if reset_mask is not None and reset_mask.any() else None)
        else:
            g, state = of_window(a, x, window, state, texts, lengths, ends, kernels, keep_state)
        if padding_mask is not None and order is not None:
            g = g.gather(2, order.argsort(dim=1)[:, None, :, None].expand_as(g)).masked_fill(padding_mask[:, None, :, None], 0)
    return g.to(values.dtype), state if keep_state else None


def check(scores: Tensor, values: Tensor, window: int, state: PoolState | None) -> None:
    """Refuses no tokens, and a state of another window or shape."""
    check_tokens("scores", scores, scores.shape[2])
    if state is None:
        return
    given = (*state.scores.shape[:2], state.tokens(), state.values.shape[3])
    needed = (*scores.shape[:2], window - 1 if window else 1, values.shape[3])
    if given != needed:
        raise Mistake(f"state has (B,H,tokens,V) = {given}; with these scores, values and window {window} it must be {needed}")


def all_of_past(
    a: Tensor, x: Tensor, state: PoolState | None, texts: Any, lengths: Any, ends: Any, kernels: bool
) -> tuple[Tensor, PoolState]:
    """Runs ``pool`` without a window on tokens without gaps. The state is one more token, the first.

    lengths (B,): how many tokens of each row count. ends (B,): the text at each row's end.
    """
    before = 0 if state is None else 1
    if state is not None:
        a, x = torch.cat([state.scores.to(a), a], 2), torch.cat([state.values.to(wide(x)), wide(x)], 2)
        texts = None if texts is None else F.pad(texts, (1, 0))
    if a.shape[2] == 2 and before and lengths is None:
        a = a if texts is None else a.masked_fill((texts != texts[:, -1:])[:, None], NOTHING)
        log_weights, g = (part[:, :, None] for part in mean(a, x))
        return g, PoolState(log_weights, g)
    log_weights, g = pooled(a, x, 0, texts, kernels)
    a, x = latest(log_weights, wide(g), 1, *own(texts, lengths, ends, before))
    return g[:, :, before:], PoolState(a, x)


def own(texts: Any, lengths: Any, ends: Any, before: int) -> tuple[Any, Any]:
    """Returns which tokens are of the text at the end of their row, and how many tokens each row has, ``before`` included."""
    return None if texts is None else texts == ends[:, None], None if lengths is None else lengths + before


def of_window(
    a: Tensor,
    x: Tensor,
    window: int,
    state: PoolState | None,
    texts: Any,
    lengths: Any,
    ends: Any,
    kernels: bool,
    keep_state: bool,
) -> tuple[Tensor, PoolState | None]:
    """Runs ``pool`` with a window. What a token sees of its segment is merged with the state's aggregate of what it sees there."""
    size, total = window - 1, a.shape[2]
    log_weights, g = pooled(a, x, window, texts, kernels)
    counted, lengths = own(texts, lengths, ends, 0)
    tokens = PoolState(*latest(a, wide(x), size, counted, lengths)) if keep_state else None
    if state is None or not size:
        return g, tokens
    (old_scores, old), reach = aggregates(state, kernels), min(size, total)
    seen = old_scores[:, :, :reach]
    if texts is not None:
        seen = seen.masked_fill((texts[:, :reach] > 0)[:, None], NOTHING)
        old_scores = old_scores.masked_fill((ends > 0)[:, None, None], NOTHING)
    first = merge(seen, old[:, :, :reach], log_weights[:, :, :reach], wide(g[:, :, :reach]))[1]
    g = torch.cat([first, g[:, :, reach:].to(first)], 2)
    if tokens is None or (lengths is None and total >= size):
        return g, tokens
    still = F.pad(old_scores, (0, total), value=NOTHING), F.pad(old, (0, 0, 0, total))
    still = latest(*still, size, None, size + (total if lengths is None else lengths))
    return g, of_aggregates(*merge(*still, *aggregates(tokens, kernels)))


def latest(a: Tensor, x: Tensor, size: int, counted: Any, lengths: Any) -> tuple[Tensor, Tensor]:
    """Returns the last ``size`` of each row's first ``lengths`` tokens, (B,H,size) and (B,H,size,V). Tokens that are not counted
    (B,T), or not there, are NOTHING."""
    if counted is not None:
        a = a.masked_fill(~counted[:, None], NOTHING)
    if not isinstance(lengths, Tensor):
        stop = a.shape[2] if lengths is None else lengths
        a, x = a[:, :, max(0, stop - size) : stop], x[:, :, max(0, stop - size) : stop]
        missing = size - a.shape[2]
        return (F.pad(a, (missing, 0), value=NOTHING), F.pad(x, (0, 0, missing, 0))) if missing else (a.clone(), x.clone())
    a, x = F.pad(a, (size, 0), value=NOTHING), F.pad(x, (0, 0, size, 0))
    index = (lengths[:, None] + torch.arange(size, device=a.device))[:, None].expand(-1, a.shape[1], -1)
    return a.gather(2, index), x.gather(2, index[..., None].expand(-1, -1, -1, x.shape[3]))


def last_weights(scores: Tensor, window: int) -> Tensor:
    """Returns the weight of each token in the mean of the last one, (B,H,T)."""
    total = scores.shape[-1]
    unseen = torch.arange(total, device=scores.device) < (total - window if window else 0)
    return scores.masked_fill(unseen, float("-inf")).softmax(-1)
