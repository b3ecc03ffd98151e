"""RWKV's channel mixing in generation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...generation.base import check_rows, function_of
from ...mixers.parts.channel_mixing import LastToken
from ...modules.stateful import StatefulModule


class ChannelMixingStep:
    """What channel mixing adds to the residual stream. norm: the one before it, if any; state: its last token."""

    def __init__(self, owner: StatefulModule, norm: nn.Module | None, state: LastToken | None) -> None:
        self.owner, self.norm = owner, None if norm is None else function_of(norm)
        self.part: Any = owner.part
        self.last: Any = None if state is None else state.vectors[:, 0]

    def __call__(self, x: Tensor) -> Tensor:
        """Maps x (R,C) to what the layer adds to it."""
        x = x if self.norm is None else self.norm(x)
        before = torch.zeros_like(x) if self.last is None else self.last
        check_rows(len(x), len(before))
        self.last = x
        return self.part.of_pair(x, before)

    def reorder(self, order: Tensor) -> None:
        """Gives row i the token of row ``order[i]``."""
        if self.last is not None:
            self.last = self.last.index_select(0, order)

    def states(self) -> list[tuple[nn.Module, object]]:
        return [(self.owner, None if self.last is None else LastToken(self.last.unsqueeze(1)))]
