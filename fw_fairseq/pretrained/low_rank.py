"""Adapters of low rank beside the projections of a pretrained attention (Hu et al. 2021), whose own weights keep their names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

ADAPTER = ".adapter."


class Adapter(nn.Module):
    """``left @ right`` is what merging adds to the weight of a projection, whose shape it has; zero at the start."""

    def __init__(self, like: Tensor, rank: int, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed  # the weight is (in,out)
        self.left = nn.Parameter(like.new_zeros(like.shape[0], rank))
        self.right = nn.Parameter(nn.init.kaiming_uniform_(like.new_empty(rank, like.shape[1]), a=5**0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.left @ self.right if self.transposed else x @ self.right.T @ self.left.T


def add_adapters(attentions: Iterable[Any], rank: int) -> None:
    """Gives an adapter to every projection of these attentions, those of heads aside."""
    for attention in attentions:
        own = {*attention.heads.modules()} if hasattr(attention, "heads") else set()
        for part in [part for part in attention.modules() if part not in own]:
            transposed = type(part).__name__ == "Conv1D"  # GPT-2's, which transformers alone has
            if transposed or isinstance(part, nn.Linear):
                part.adapter = Adapter(part.weight.detach(), rank, transposed)
                part.register_forward_hook(lambda module, args, output: output + module.adapter(args[0]))


@torch.no_grad()
def merged(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model without adapters that computes the same."""
    found = {name: value for name, value in weights.items() if ADAPTER not in name}
    for name in weights:
        if name.endswith(f"{ADAPTER}left"):
            part = name.removesuffix(f"{ADAPTER}left")
            found[f"{part}.weight"] = found[f"{part}.weight"] + weights[name] @ weights[f"{part}{ADAPTER}right"]
    return found
