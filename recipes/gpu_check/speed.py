"""The kernels' time on the device and the host's time for a call, apart: every rule where no processor is idle and where most are,
long sequences, few sequences, rows that do not start at 16 bytes, attention normalisation, gates of channels that forget fast.

    python recipes/gpu_check/speed.py OUT.json
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from fw_fairseq.ops import fast_weight
from fw_fairseq.rules import RULES

CALLS = 20  # of which a figure is the mean; their launches fit the device's queue, which takes about a thousand
CALLS_IN_PARTS = 3  # of long sequences, of which each call has hundreds of launches
WIDTH = 64  # of keys and values
CYCLES_PER_SECOND = 2e9  # at most, of the device


class Case(NamedTuple):
    rule: str
    batch: int
    heads: int
    tokens: int
    aligned: bool = True
    attention_norm: bool = False
    least_gate: float = 0.9  # of those that are drawn uniformly up to 1


ALL = ("sum", "gated", "delta", "gated_delta", "decay", "kda")
CASES = [Case(rule, batch, heads, tokens) for batch, heads, tokens in ((8, 8, 2048), (32, 16, 4096)) for rule in ALL]
CASES += [Case(rule, 1, 8, tokens) for rule in ("gated", "delta") for tokens in (8192, 65536)]
CASES += [Case(rule, 8, 8, 2048, aligned=False) for rule in ("gated", "delta")]
CASES += [Case(rule, 8, 8, 2048, attention_norm=True) for rule in ("sum", "gated", "delta")]
CASES += [Case(rule, 8, 8, 2048, least_gate=0.0) for rule in ("decay", "kda")]


def draw(case: Case, device: str) -> dict[str, torch.Tensor]:
    """q, k, v in bf16 and gates; rows that are not aligned begin one number later."""
    shape, skipped = (case.batch, case.heads, case.tokens), 0 if case.aligned else 1
    x = {name: torch.rand(*shape, WIDTH + skipped, device=device).bfloat16()[..., skipped:] for name in "qkv"}
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1) if case.aligned else x["k"].div_(WIDTH**0.5)
    gates = RULES[case.rule].gates.items()
    least = case.least_gate
    x |= {name: torch.rand(*shape, *[WIDTH] * (gate.axis is not None), device=device) * (1 - least) + least for name, gate in gates}
    return {name: t.detach().requires_grad_() for name, t in x.items()}


def passes(case: Case, x: dict[str, torch.Tensor]) -> dict[str, Callable[[], object]]:
    gates = {name: x[name] for name in RULES[case.rule].gates}

    def forward():
        return fast_weight(x["q"], x["k"], x["v"], case.rule, gates, attention_norm=case.attention_norm)[0]

    def inference():
        with torch.no_grad():
            return forward()

    dy = torch.ones_like(inference())
    return {"forward": inference, "forward and backward": lambda: torch.autograd.grad(forward(), list(x.values()), dy)}


def measure(call: Callable[[], object], calls: int = CALLS, cuda=torch.cuda, clock=time.perf_counter) -> dict[str, float]:
    """Milliseconds of a call on the host and on the device. The device first sleeps for as long as the host takes for all calls, so
    that none of it waits for the host."""
    for _ in range(3):  # which compile, and fill torch's cache
        call()
    cuda.synchronize()
    start = clock()
    for _ in range(calls):
        call()
    host = clock() - start
    cuda.synchronize()
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    cuda._sleep(int(2 * host * CYCLES_PER_SECOND))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    cuda.synchronize()
    return {"host_ms": 1e3 * host / calls, "device_ms": begin.elapsed_time(end) / calls}


def main(out: Path) -> int:
    rows = []
    for case in CASES:
        torch.manual_seed(0)
        for name, call in passes(case, draw(case, "cuda")).items():
            calls = CALLS_IN_PARTS if case.batch == 1 else CALLS
            rows.append(case._asdict() | {"pass": name} | measure(call, calls))
            print(json.dumps(rows[-1]))
            out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
