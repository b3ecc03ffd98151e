"""The rules that have kernels, as the registry of the kernel families says."""

from __future__ import annotations

from fw_fairseq.ops.kernels import recurrence, step
from fw_fairseq.rules import RULES, Coefficients

from .draws import FITTING, PLAIN, draw_gates


def coefficients_of(name: str) -> Coefficients:
    return RULES[name].coefficients(**draw_gates(RULES[name], (1, 1, 1, 2, 2)))


KNOWN = [name for name in FITTING if name in PLAIN]


KERNEL_RULES = [name for name in KNOWN if recurrence.find_family(coefficients_of(name)) is not None]


STEP_RULES = [name for name in KNOWN if all(kind in step.COMPUTES for kind in recurrence.kinds(coefficients_of(name)))]


CHANNEL_RULES = ["kda", "gdn2", "rwkv7"]  # decay per channel with erase: not plain, but the operation takes their gates
