"""A rule and a feature map from outside the package. With ``PYTEST_PLUGINS=support.extension`` the tests that go through the
registries find both there, as if they were the package's own.

"keyed" decays every channel of the keys by itself and then makes a delta write; "square" is a map that no kernel knows.
"""

from __future__ import annotations

import os

import torch
from support.definitions import WRITES
from torch import Tensor

from fw_fairseq.feature_maps import FEATURE_MAPS, Elementwise
from fw_fairseq.rules import RULES, Coefficients, Gate, Rule

KEYED = Rule(
    equation="W_t = Diag(f_t) W_{t-1} + beta_t k_t (v_t - (Diag(f_t) W_{t-1})^T k_t)^T",
    source="the tests",
    gates={"f": Gate("K", "uniform"), "beta": Gate()},
    coefficients=lambda f, beta: Coefficients(f=f, e=beta, w=beta),
)


class Square(Elementwise):
    equation = "x^2"
    non_negative = True

    def forward(self, x: Tensor) -> Tensor:
        return x * x


def keyed_write(memory: Tensor, k: Tensor, v: Tensor, f: Tensor, beta: Tensor) -> Tensor:
    """The memory (K,V) after one token, written out."""
    kept = torch.diag(f) @ memory
    return kept - beta * torch.outer(k, k @ kept) + beta * torch.outer(k, v)


def register() -> None:
    RULES["keyed"], FEATURE_MAPS["square"], WRITES["keyed"] = KEYED, Square, keyed_write


if __name__ in os.environ.get("PYTEST_PLUGINS", "").split(","):  # in the workers that a test starts, too
    register()
