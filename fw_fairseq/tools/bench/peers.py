"""Other people's kernels for the same recurrences, timed by fw-bench where they are installed and there is a GPU."""

from __future__ import annotations

import importlib
import importlib.util

import torch
from torch import Tensor

from .contest import say, timed

# rule -> (module of flash-linear-attention, function). "decay" has its key-side decay only: nobody has z.
FLA = {
    "sum": ("fla.ops.linear_attn", "chunk_linear_attn"),
    "gated": ("fla.ops.simple_gla", "chunk_simple_gla"),
    "decay": ("fla.ops.gla", "chunk_gla"),
    "delta": ("fla.ops.delta_rule", "chunk_delta_rule"),
    "gated_delta": ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
}


def peer_name(rule: str) -> str:
    return f"fla {FLA[rule][1]}" if rule in FLA else ""


def running_peers(rules: list[str], draw, device: str) -> tuple[dict[str, object], dict[str, str]]:
    """The calls of the peers that run, and why others do not: some devices and compilers they refuse, at the first call.
    ``draw(rule)`` makes their inputs."""
    calls, refused = {}, {}
    for rule in rules:
        inputs = draw(rule)
        try:
            if call := fla_call(rule, *inputs):
                timed(call, device)
                calls[peer_name(rule)] = call
        except Exception as error:  # of any kind: it is their code
            reason = refused[peer_name(rule)] = f"{type(error).__name__}: {error}".split("\n")[0]
            say(f"{peer_name(rule)}: not measured: {reason}")
    return calls, refused


def fla_call(rule: str, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]):
    """Forward and backward of flash-linear-attention's kernel for ``rule``; None where there is none.

    Its tensors are (B,T,H,D) and its gates logarithms, made outside of what is timed.
    """
    if not q.is_cuda or rule not in FLA or importlib.util.find_spec("fla") is None:
        return None
    module, name = FLA[rule]
    kernel = getattr(importlib.import_module(module), name)
    q, k, v = (leaf(x) for x in (q, k, v))
    options = {"normalize": False} if rule == "sum" else {}
    if decays := [gates[gate] for gate in ("g", "f") if gate in gates]:
        options["g"] = leaf(decays[0].float().log())
    if "beta" in gates:
        options["beta"] = leaf(gates["beta"])
    leaves = [q, k, v, *(x for x in options.values() if isinstance(x, Tensor))]
    dy = torch.randn_like(v)
    return lambda: torch.autograd.grad(kernel(q, k, v, scale=1.0, **options)[0], leaves, dy)


def leaf(x: Tensor) -> Tensor:
    return x.detach().transpose(1, 2).contiguous().requires_grad_()
