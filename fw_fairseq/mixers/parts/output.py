"""The norm of what each head reads, and what a layer says of its memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...feature_maps import wide
from ...ops import FastWeightState
from ...ops.chunkwise.recall import until_end
from ...rules import Coefficients, Rule

EPS = 1e-5


class HeadNorm(nn.Module):
    """The reads of each head times ``scale``, divided by their root mean square, times learnt weights, which all heads share."""

    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, y: Tensor) -> Tensor:
        x = wide(y) if self.scale == 1 else wide(y) * self.scale
        return (x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.weight).to(y.dtype)


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


def explained(read: Tensor, coefficients: Coefficients, writes: int) -> dict[str, Tensor]:
    """The weights (H,T) of the tokens in the read of the last one, and the strengths of their writes, from what the last query
    reads of values with one channel for each write (H,n T)."""
    write = coefficients.w
    if coefficients.z is not None:
        read = read * until_end(coefficients.z)[0].exp().mean(-1)
    write = torch.ones_like(read) if write is None else write[0]
    if write.dim() == 3:  # a strength per channel, which those values do not have
        write = write.mean(-1)
        read = read * write
    read, write = (part.unflatten(-1, (-1, writes)).sum(-1) for part in (read, write))
    return {"read": read, "write": write}
