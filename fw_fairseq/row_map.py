"""The feature maps that kernels can apply to the rows of q and k as they load them: maps without parameters, each with any norm."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .feature_maps import dpfp, elu, normalised

MAPS = {"identity": lambda x, nu: x, "elu": lambda x, nu: elu(x), "relu": lambda x, nu: torch.relu(x), "dpfp": dpfp}


class RowMap(NamedTuple):
    """A map by name and its norm. Calling it on rows (...,D) computes the features (...,K) in PyTorch, which is the definition."""

    name: str = "identity"  # in MAPS
    nu: int = 1  # of dpfp
    norm: str = "none"  # in feature_maps.NORMS

    def width(self, d: int) -> int:
        """K, the number of features of rows that are d wide."""
        return 2 * self.nu * d if self.name == "dpfp" else d

    def __call__(self, x: Tensor) -> Tensor:
        return normalised(lambda x: MAPS[self.name](x, self.nu), self.norm, x)


AS_IS = RowMap()  # q and k are features already
