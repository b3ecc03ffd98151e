"""Statistics of a layer's gates and memory, kept in the forward passes that are asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops import FastWeightState
from ...rules import Rule


class Watched:
    """The part of a layer that keeps them."""

    rule: Rule
    training: bool
    watched = keeps_state_norm = False  # see ``watch``
    last_statistics: dict[str, Tensor | None]
    state_norm: Tensor | None = None  # with its gradient

    def watch(self, keeps_state_norm: bool) -> None:
        """With ``keeps_state_norm``, the next training forward also leaves ``state_norm``, with its gradient."""
        self.watched, self.keeps_state_norm = True, keeps_state_norm
        self.last_statistics, self.state_norm = dict.fromkeys(self.last_statistics), None

    def notes(self) -> bool:
        return self.training and self.watched

    def note_statistics(self, gates: dict[str, Tensor], state: FastWeightState, padding_mask: Tensor | None) -> None:
        """Keeps those of a watched forward in training."""
        if self.notes():
            self.watched, self.last_statistics = False, {**measured(self.rule, gates, state, padding_mask)}
            self.state_norm = state_norm(state) if self.keeps_state_norm else None

    def take_state_norm(self) -> Tensor | None:
        """Returns ``state_norm`` and forgets it: it is in a graph, which a copy of the model could not hold."""
        norm, self.state_norm = self.state_norm, None
        return norm

    def statistics(self) -> dict[str, Tensor | None]:
        return self.last_statistics


@torch.no_grad()
def measured(rule: Rule, gates: dict[str, Tensor], state: FastWeightState, padding_mask: Tensor | None) -> dict[str, Tensor]:
    """The means of gates and write strengths over tokens, and of the memories' norms."""
    statistics = {f"gate_{name}": mean_of_tokens(gate, padding_mask) for name, gate in gates.items()}
    if rule.coefficients is not None:
        write = rule.coefficients(**gates).w
        one = torch.ones((), device=state.memory.device)
        statistics["write_strength"] = one if write is None else mean_of_tokens(write, padding_mask)
    return statistics | {"state_norm": state_norm(state)}


def state_norm(state: FastWeightState) -> Tensor:
    """The mean norm of the memories, which are a matrix each."""
    assert isinstance(state.memory, Tensor)
    return state.memory.flatten(2).norm(dim=-1).mean()


def mean_of_tokens(x: Tensor, padding_mask: Tensor | None) -> Tensor:
    """Returns the mean of x, (B,H,n T) or (B,H,n T,C), over what belongs to tokens; 0 where all is padding. padding_mask: (B,T)."""
    if padding_mask is None:
        return x.mean()
    hidden = padding_mask.repeat_interleave(x.shape[2] // padding_mask.shape[1], 1)[:, None]
    hidden = hidden if x.dim() == 3 else hidden[..., None]
    count = (~hidden).sum() * (x.numel() // (x.shape[0] * x.shape[2]))
    return x.masked_fill(hidden, 0).sum() / count.clamp(min=1)
