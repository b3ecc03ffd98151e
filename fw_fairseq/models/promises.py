"""The prompt of a decoding, which is known before its tokens come one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import get_ident

import torch
from torch import Tensor


@dataclass
class Promise:
    """The tokens that a decoding begins with, (B,P), each in ``beam`` neighbouring rows. ``features``: theirs, once read."""

    prompt: Tensor
    beam: int
    features: Tensor | None = None


class ReadsPromises:
    """A mixin of decoders that read the prompt of a decoding in one pass, if they were told of it."""

    promises: dict[int, Promise]  # of each thread that decodes

    def expect_prompt(self, prompt: Tensor | None, beam: int = 1) -> None:
        """The next incremental decoding by this thread begins with these tokens, (B,P), given in steps or not, each in ``beam``
        neighbouring rows; None: no such promise."""
        self.promises.pop(get_ident(), None)
        if prompt is not None:
            self.promises[get_ident()] = Promise(prompt, beam)

    def promised(self, tokens: int, read: Callable[[Tensor], Tensor], reorder: Callable[[Tensor], None]) -> Tensor | None:
        """The features at the last of so many tokens, where they lie in the prompt; None: they do not. The first call reads all of
        the prompt, once for all rows of a text, whose states are then those of the rows."""
        promise = self.promises.get(get_ident())
        if promise is None or tokens > promise.prompt.shape[1]:
            return None
        if promise.features is None:
            features = read(promise.prompt)
            rows = torch.arange(len(promise.prompt), device=features.device).repeat_interleave(promise.beam)
            reorder(rows)
            promise.features = features.index_select(0, rows)
        return promise.features[:, tokens - 1 : tokens]
