"""Feature maps that kernels apply to the rows of q and k as they load them: those without parameters, each with any norm."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .feature_maps import NORMS, dpfp, elu

MAPS = {"identity": lambda x, nu: x, "elu": lambda x, nu: elu(x), "relu": lambda x, nu: torch.relu(x), "dpfp": dpfp}


class RowMap(NamedTuple):
    """Called on (...,D) it is the definition in PyTorch, (...,K)."""

    name: str = "identity"
    nu: int = 1  # of dpfp
    norm: str = "none"

    def width(self, d: int) -> int:
        return 2 * self.nu * d if self.name == "dpfp" else d

    def __call__(self, x: Tensor) -> Tensor:
        return NORMS[self.norm](MAPS[self.name](x, self.nu))


AS_IS = RowMap()  # q and k are features already
