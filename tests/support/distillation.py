"""A batch for the distillation criterion."""

from __future__ import annotations

import torch
from support.language_models import draw


def sample(length: int = 9) -> dict:
    tokens = draw(2, length + 1)
    net_input = {"src_tokens": tokens[:, :-1].contiguous(), "src_lengths": torch.full((2,), length)}
    return {"net_input": net_input, "target": tokens[:, 1:].contiguous(), "ntokens": 2 * length, "nsentences": 2}
