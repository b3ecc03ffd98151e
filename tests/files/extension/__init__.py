"""An extension of its own: an update rule, a feature map and a mixer, for ``fairseq-train --user-dir path/to/extension``.

The order matters: what is registered before ``fw_fairseq.models`` is imported is a choice of the options.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fw_fairseq.feature_maps import FEATURE_MAPS, FeatureMap
from fw_fairseq.mixers import MIXERS, Mixer
from fw_fairseq.ops.state import tensor_state
from fw_fairseq.rules import RULES, Coefficients, Gate, Rule

RULES["decayed_delta"] = Rule(
    equation="W_t = Diag(f_t) W_{t-1} + beta_t k_t (v_t - (Diag(f_t) W_{t-1})^T k_t)^T",
    source="gated_delta with a decay for each channel of the keys",
    gates={"f": Gate("K", "uniform"), "beta": Gate(bias=-1.0)},
    coefficients=lambda f, beta: Coefficients(f=f, e=beta, w=beta),
)


class Squares(FeatureMap):
    equation = "[relu(x)^2, relu(-x)^2]"
    non_negative = True

    def __init__(self, head_dim: int):
        super().__init__(head_dim, 2 * head_dim)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, -x], -1).relu().square()


FEATURE_MAPS["squares"] = Squares


@tensor_state
class AverageState(NamedTuple):
    average: Tensor  # (B,C)


class MovingAverage(Mixer):
    """h_t = a h_{t-1} + (1 - a) x_t with one a per channel; y_t = W h_t."""

    state_type = AverageState

    def __init__(self, embed_dim: int, num_heads: int, config):
        super().__init__(embed_dim, num_heads)
        self.decay, self.out_proj = nn.Parameter(torch.zeros(embed_dim)), nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor, state=None, padding_mask=None, reset_mask=None, **unused):
        h, a, outputs = torch.zeros_like(x[0]) if state is None else state.average, self.decay.sigmoid(), []
        for t, x_t in enumerate(x):
            start = h if reset_mask is None else h.masked_fill(reset_mask[:, t, None], 0)
            h = a * start + (1 - a) * x_t
            h = h if padding_mask is None else torch.where(padding_mask[:, t, None], start, h)
            outputs.append(h)
        return self.out_proj(torch.stack(outputs)), AverageState(h)


MIXERS["moving_average"] = MovingAverage

import fw_fairseq.models  # noqa: E402, F401  registers models, tasks and criterions with these choices
