"""The last tokens that heads keep: softmax attends to them, and each token enters the memory when it leaves the window."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..mixers.look_back import Reach, View, WindowState, attend, look_back
from ..ops import FastWeightState
from ..ops.state import tensor_state


@tensor_state
class HeadsState(NamedTuple):
    """The memory of the tokens before the window, as in ``FastWeightState``, and the window: for each token what was made of it,
    and whether there was one."""

    memory: Tensor | None = None  # (B,H,K,V)
    normaliser: Tensor | None = None  # (B,H,K)
    log_scale: Tensor | None = None  # (B,H)
    recent: Tensor | None = None  # (B,W,X)
    filled: Tensor | None = None  # (B,W)

    def of_memory(self) -> FastWeightState | None:
        """The part that ``fast_weight`` knows; None where nothing has left the window yet."""
        return None if self.memory is None else FastWeightState(self.memory, self.normaliser, self.log_scale)


class Window:
    """W tokens and those before them: ``kept`` (B,S,X) has the T new tokens at its end."""

    def __init__(
        self, made: Tensor, state: HeadsState | None, width: int, padding_mask: Tensor | None, reset_mask: Tensor | None
    ) -> None:
        """made: (B,T,X), what was made of the new tokens."""
        before = None
        self.kept, self.width = made, width
        if state is not None and state.recent is not None and state.filled is not None:
            before = WindowState(None, state.filled)
            self.kept = torch.cat([state.recent.to(made), made], 1)
        self.view: View = look_back(made, before, Reach(width - 1), padding_mask, reset_mask)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
        """Softmax attention of q (B,H,T,D) to the last W tokens, k (B,H,S,D) and v (B,H,S,V)."""
        return attend(q, k, v, self.view, dropout=dropout)

    def leaving(self) -> tuple[Tensor, Tensor]:
        """What was made of the token W tokens before each of the T in its text, (B,T,X), and where there was none, (B,T)."""
        view, total = self.view, self.view.total
        if view.places is None:
            missing = max(0, self.width - view.before)
            start = view.before + missing - self.width
            texts = F.pad(view.texts, (missing, 0), value=-1)[:, start : start + total]
            found = F.pad(self.kept, (0, 0, missing, 0))[:, start : start + total]
        else:
            slots = (view.texts < 0).to(torch.uint8).argsort(dim=1, stable=True)  # those of tokens come first
            wanted = view.places[:, view.before :] - 1 - self.width
            slot = slots.gather(1, wanted.clamp(min=0))
            texts = view.texts.gather(1, slot).masked_fill(wanted < 0, -1)
            found = self.kept.gather(1, slot[..., None].expand(-1, -1, self.kept.shape[2]))
        own = view.texts[:, view.before :]
        return found, (texts != own) | (own < 0)

    def last(self) -> tuple[Tensor, Tensor]:
        """The last W tokens, (B,W,X), and which of them there are."""
        state = self.view._replace(most=self.width).last(memory=self.kept)
        assert state.memory is not None
        return state.memory, state.filled
