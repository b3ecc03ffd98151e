"""The positions of the code of Schlag et al. 2021, which count from the end of a segment."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import Mistake
from ..mixers.local_attention import sinusoids


class PositionsFromEnd(nn.Module):
    """Sinusoids of the number of tokens that follow in the row: the last token has position 0. Padding has zeros. It takes the
    place of fairseq's embedding of positions."""

    max_positions = 100_000  # as fairseq's
    like: Tensor

    def __init__(self, width: int, padding: int) -> None:
        super().__init__()
        self.width, self.padding = width, padding
        self.register_buffer("like", torch.zeros(()), persistent=False)

    @classmethod
    def in_place_of(cls, embedding: nn.Module | None, width: int, padding: int) -> PositionsFromEnd:
        if embedding is None or isinstance(embedding, nn.Embedding):
            raise Mistake(
                "--positions-from-end is for sinusoidal positions; leave it out, or --no-token-positional-embeddings and"
                " --decoder-learned-pos"
            )
        return cls(width, padding)

    def forward(self, tokens: Tensor, incremental_state: dict | None = None) -> Tensor:
        """Maps tokens (B,T) to (B,T,C)."""
        real = tokens.ne(self.padding).long()
        following = real.flip(1).cumsum(1).flip(1) - real
        table = sinusoids(tokens.shape[1], self.width, self.like).to(self.like.dtype)
        return table[following] * real.unsqueeze(-1)
