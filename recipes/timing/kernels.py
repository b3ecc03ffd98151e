"""The modelled time of the kernels of a model, by the model of their machine code in ``tests/counts``."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

from .rates import MEASURED

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))


def kernel_ms(kernel: dict[str, Any], sequences: float, precision: str) -> float:
    """Milliseconds on an H100 of the forward of training and the backward of one call, for so many sequences."""
    return modelled(json.dumps(kernel), sequences, precision)


@functools.cache  # layers are alike
def modelled(kernel: str, sequences: float, precision: str) -> float:
    from counts.counted import TOKENS, figures

    call = json.loads(kernel)
    heads, length = call["shapes"]["q"][1:3]
    few, many = (launches(call, tokens, precision) for tokens in TOKENS)
    shape = (sequences, heads, length)
    factor = MEASURED[call["settings"][2]]
    return factor * sum(figures(pair, "90", (shape,)).ms[0] for pair in zip(few, many))


def launches(call: dict[str, Any], tokens: int, precision: str) -> list:
    """What would be launched for one sequence and head of so many tokens."""
    import torch
    from counts.cases import TYPES
    from hostcuda import Recorder
    from support.emulated import emulated

    from fw_fairseq.autograd import call as operator
    from fw_fairseq.ops.kernels.recurrence import choose_precision

    dtype = TYPES["fp32" if precision == "tf32" else precision]

    def made(name: str):
        shape = call["shapes"][name]
        kind = dtype if name in "qkv" else torch.float32
        return None if shape is None else torch.zeros(1, 1, tokens, *shape[3:], dtype=kind, requires_grad=True)

    rows = [made(name) for name in ("q", "k", "v", "f", "z", "e", "w")]
    eps, least, family = call["settings"]
    with emulated(Recorder()) as recorder:
        products = "tf32" if precision == "tf32" else choose_precision(dtype)
        y, *_ = operator("scan", *rows, None, None, eps, least, family, products, True, False, *call["row_map"])
        y.backward(torch.zeros_like(y))
    return recorder.launches
