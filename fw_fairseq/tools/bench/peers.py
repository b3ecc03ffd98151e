"""Other people's kernels for the same recurrences, timed by fw-bench where they are installed and there is a GPU."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

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
    """Returns the name of a rule's peer in the report."""
    return f"fla {FLA[rule][1]}" if rule in FLA else ""


def running_peers(rules: list[str], draw: Callable, device: str) -> tuple[dict[str, Callable], dict[str, str]]:
    """The calls of the peers that run, and why others do not: some devices and compilers they refuse, at the first call.
    ``draw(rule)`` makes their inputs."""
    calls, refused = {}, {}
    for rule in rules if importlib.util.find_spec("fla") else ():
        if rule not in FLA:
            continue
        try:
            call = _fla_call(rule, *draw(rule))
            timed(call, device)
            calls[peer_name(rule)] = call
        except Exception as error:  # of any kind: it is their code
            reason = refused[peer_name(rule)] = f"{type(error).__name__}: {error}".split("\n")[0]
            say(f"{peer_name(rule)}: not measured: {reason}")
    return calls, refused


def _fla_call(rule: str, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor]) -> Callable[[], object]:
    """Forward and backward of flash-linear-attention's kernel for ``rule``. Its tensors are (B,T,H,D) and its gates logarithms,
    made outside of what is timed."""
    module, name = FLA[rule]
    kernel = getattr(importlib.import_module(module), name)
    q, k, v = (_leaf(x) for x in (q, k, v))
    options: dict = {"normalize": False} if rule == "sum" else {}
    if decays := [gates[gate] for gate in ("g", "f") if gate in gates]:
        options["g"] = _leaf(decays[0].float().log())
    if "beta" in gates:
        options["beta"] = _leaf(gates["beta"])
    leaves = [q, k, v, *(x for x in options.values() if isinstance(x, Tensor))]
    dy = torch.randn_like(v)
    return lambda: torch.autograd.grad(kernel(q, k, v, scale=1.0, **options)[0], leaves, dy)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().transpose(1, 2).contiguous().requires_grad_()
