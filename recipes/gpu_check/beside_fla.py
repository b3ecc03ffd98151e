"""The project's kernels beside flash-linear-attention's on a device, same shapes, device time alone:

    python recipes/gpu_check/beside_fla.py OUT.json

Needs flash-linear-attention 0.6.0, which Triton tunes when it first runs: of each kernel's configurations the most usual ones are
left, so that this takes minutes. Triton 3.4 to 3.7.0 miscompiles one of its kernels on Hopper for tiles of 64 columns of keys, and
it refuses to run. Here it runs with tiles of 32 columns where keys are 64 wide, which makes its backward a little slower than with
Triton 3.7.1. "decay" has its key side only: nobody has the other.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "docs" / "results" / "benchmarks"), str(ROOT)]

from peers import FLA, fla_call  # noqa: E402
from speed import measure  # noqa: E402

from fw_fairseq.ops import fast_weight  # noqa: E402
from fw_fairseq.rules import RULES  # noqa: E402

KEPT = 2  # configurations of each kernel
NARROW = 64  # width of keys whose tiles are halved
SHAPES = [(8, 8, 2048, 64), (8, 8, 512, 64), (4, 16, 2048, 128), (8, 16, 1024, 128), (26, 8, 512, 128), (32, 16, 4096, 64)]
SHAPES += [(1, 8, 8192, 128), (1, 32, 8192, 128)]  # sequences, heads, tokens, width of keys and values


def usual(config: Any) -> tuple:
    """Small for a middle number of warps, two stages and large tiles."""
    sizes = sum(value for value in config.kwargs.values() if isinstance(value, int))
    return abs(config.num_warps - 4), abs((config.num_stages or 3) - 2), -sizes


def tune_less(tuners: Iterable[Any], kept: int = KEPT) -> None:
    """Leaves each tuner its most usual configurations."""
    for tuner in tuners:
        tuner.configs = sorted(tuner.configs, key=usual)[:kept]


def prepare() -> None:
    """Before anything of flash-linear-attention runs."""
    os.environ |= {"FLA_DISABLE_BACKEND_DISPATCH": "1", "FLA_CACHE_RESULTS": "1"}
    for module, _ in FLA.values():
        importlib.import_module(module)
    from fla.ops.common import chunk_o
    from triton.runtime.autotuner import Autotuner

    tune_less([x for x in gc.get_objects() if isinstance(x, Autotuner)])
    narrow_tiles(chunk_o)


def narrow_tiles(chunk_o: Any) -> None:
    """Lifts the refusal, with tiles of 32 columns where keys are 64 wide; in every module that has the function."""
    chunk_o.TRITON_ABOVE_3_7_1 = True
    original, has_room = chunk_o.chunk_bwd_dqkwg, chunk_o.check_shared_mem

    @functools.wraps(original)
    def narrowed(q, *args, **more):
        chunk_o.check_shared_mem = has_room if q.shape[-1] != NARROW else lambda *asked: False
        try:
            return original(q, *args, **more)
        finally:
            chunk_o.check_shared_mem = has_room

    for module in list(sys.modules.values()):
        if getattr(module, "chunk_bwd_dqkwg", None) is original:
            module.chunk_bwd_dqkwg = narrowed


def compared(rule: str, shape: tuple[int, int, int, int], peer: Callable, device: str, timed: Callable) -> dict[str, Any]:
    """Milliseconds of the device of forward and backward of both, of our forward, and seconds of the peer's first call."""
    B, H, T, D = shape
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, H, T, D, device=device, dtype=torch.bfloat16) for _ in range(3))
    k = torch.nn.functional.normalize(k.float(), dim=-1).bfloat16()
    gates = {n: torch.rand(g.shape((B, H, T, D, D)), device=device) * 0.1 + 0.9 for n, g in RULES[rule].gates.items()}
    leaves = [x.detach().requires_grad_() for x in (q, k, v, *gates.values())]
    dy = torch.randn_like(v)

    def forward():
        return fast_weight(*leaves[:3], rule, dict(zip(gates, leaves[3:])))[0]

    def inference():
        with torch.no_grad():
            return forward()

    row: dict[str, Any] = {"rule": rule, "batch": B, "heads": H, "tokens": T, "width": D}
    try:
        row["forward_ms"] = timed(inference)["device_ms"]
        row["both_ms"] = timed(lambda: torch.autograd.grad(forward(), leaves, dy))["device_ms"]
        call, start = peer(rule, q, k, v, gates), time.perf_counter()
        call()
        row["tuning_s"] = time.perf_counter() - start
        row["fla_both_ms"] = timed(call)["device_ms"]
    except Exception as error:  # the other shapes are worth knowing too
        row["failed"] = f"{type(error).__name__}: {error}"[:200]
    return row


def main(out: Path) -> int:
    prepare()
    rows = []
    for rule in FLA:
        for shape in SHAPES:
            rows.append(compared(rule, shape, fla_call, "cuda", measure))
            print(json.dumps(rows[-1]), flush=True)
            out.write_text(json.dumps(rows, indent=1) + "\n")
    return any("failed" in row for row in rows)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
