"""fw-bench ops with flash-linear-attention's kernels beside ours, where it is installed and there is a GPU; it takes its options:

python docs/results/benchmarks/peers.py --device cuda --dtype bfloat16
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fw_fairseq.tools.bench import __main__ as bench
from fw_fairseq.tools.bench.ops import PEERS

# rule -> (module of flash-linear-attention, function). "decay" has its key-side decay only: nobody has z.
FLA = {
    "sum": ("fla.ops.linear_attn", "chunk_linear_attn"),
    "gated": ("fla.ops.simple_gla", "chunk_simple_gla"),
    "decay": ("fla.ops.gla", "chunk_gla"),
    "delta": ("fla.ops.delta_rule", "chunk_delta_rule"),
    "gated_delta": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
}


def fla_call(rule: str, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> Callable[[], object]:
    """Forward and backward of flash-linear-attention's kernel for ``rule``. Its tensors are (B,T,H,D) and its gates logarithms,
    made outside of what is timed."""
    module, name = FLA[rule]
    kernel = getattr(importlib.import_module(module), name)
    q, k, v = (leaf(x) for x in (q, k, v))
    options: dict = {"normalize": False} if rule == "sum" else {}
    if decays := [gates[gate] for gate in ("g", "f") if gate in gates]:
        options["g"] = leaf(decays[0].float().log())
    if "beta" in gates:
        options["beta"] = leaf(gates["beta"])
    leaves = [q, k, v, *(x for x in options.values() if isinstance(x, Tensor))]
    dy = torch.randn_like(v)
    return lambda: torch.autograd.grad(kernel(q, k, v, scale=1.0, **options)[0], leaves, dy)


def leaf(x: Tensor) -> Tensor:
    """Returns it in the layout of the other kernels."""
    return x.detach().transpose(1, 2).contiguous().requires_grad_()


if __name__ == "__main__":
    PEERS.update({rule: (f"fla {name}", partial(fla_call, rule)) for rule, (_, name) in FLA.items()})
    bench.main(["ops", *sys.argv[1:]])
