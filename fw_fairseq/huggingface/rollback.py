"""How a cache takes tokens back: it keeps the states before some of the last tokens, and the embeddings of the tokens since.

A recurrent state cannot be undone. The cache goes back to a state that it kept, and reads the tokens between that and the place
that is asked for once more, in one pass before the next tokens.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import Mistake

DRAFTS = 32  # tokens that generation with drafts may take back


class Mark(NamedTuple):
    """A place in the text to go back to."""

    length: int
    tokens: Any  # (B,), as in the cache
    states: dict[int, Any]


class TakesBack:
    """The part of a cache that goes back, and that makes copies of it."""

    steps: Any
    kept: dict[int, Any]
    tokens: Any
    length: int

    def __init__(self) -> None:
        self.limit = 0
        self.marks: list[Mark] = []
        self.embedded: list[Tensor] = []  # (B,T,C) each: what was read from the first mark on
        self.again: Tensor | None = None  # what is to be read again before the next tokens

    @property
    def is_croppable(self) -> bool:
        """Whether ``crop`` can take tokens back; transformers asks for it."""
        return self.limit > 0

    def remember(self, tokens: int) -> None:
        """From now on ``crop`` can take back so many of the tokens that follow, and all of the last pass but the first."""
        self.limit = max(self.limit, tokens)

    def activate_past_recording(self) -> None:
        """By this name transformers asks for it, from 5.24 on."""
        self.remember(DRAFTS)

    def now(self) -> dict[int, Any]:
        """The states after the last token, which the steps of generation go on changing elsewhere."""
        return self.kept if self.steps is None else self.steps.states()

    def note(self, model: Any, x: Tensor, plain: bool) -> None:
        """To be called before a model reads tokens with the embeddings x (B,T,C). ``plain``: there is neither padding nor a new
        text among them; beyond others nothing goes back."""
        self.catch_up(model)
        if not self.limit or not plain:
            self.forget()
            return
        if not self.marks or self.length - self.marks[-1].length >= self.limit:
            self.marks.append(Mark(self.length, self.tokens, dict(self.now())))
        while len(self.marks) > 1 and self.marks[1].length <= self.length - self.limit:
            gone = self.marks.pop(0)
            self.embedded = [torch.cat(self.embedded, 1)[:, self.marks[0].length - gone.length :]]
        self.embedded.append(x.detach())

    def catch_up(self, model: Any) -> None:
        """Reads what ``crop`` left to be read again."""
        if self.again is not None:
            again, self.again = self.again, None
            self.length -= again.shape[1]
            with torch.no_grad():
                model.through_layers(again, None, None, self, self.tokens)

    def forget(self) -> None:
        """Tokens so far cannot be taken back any more."""
        self.marks, self.embedded = [], []

    def crop(self, length: int) -> None:
        """Takes back -length tokens, or, as earlier versions of transformers ask for it, all but the first ``length``."""
        count = -length if length <= 0 else max(0, self.length - length)
        if not count:
            return
        target = self.length - count
        marks = [mark for mark in self.marks if mark.length <= target]
        if not marks:
            most = self.length - self.marks[0].length if self.marks else 0
            raise Mistake(f"this cache can take back {most} tokens, not {count}; call its remember({count}) before they are read")
        first, last = marks[0].length, marks[-1]
        read = torch.cat(self.embedded, 1)[:, : target - first]
        self.marks, self.embedded = marks, [read]
        self.again = read[:, last.length - first :] if target > last.length else None
        self.kept, self.steps = dict(last.states), None
        self.tokens, self.length = self.tokens - count, target

    def fork(self) -> Any:
        """Returns a cache that goes on from here by itself. Nothing is copied until it does."""
        other = copy.copy(self)
        other.kept, other.steps = dict(self.now()), None
        other.marks, other.embedded = [*self.marks], [*self.embedded]
        return other
