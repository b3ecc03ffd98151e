"""Every rule through the kernels once, small, and some with a feature map inside them: forward, backward and one token against the
step form; then the scans of SRU and of additive attention against PyTorch's. What they are compared with is computed on the CPU, so
that compute-sanitizer sees little but the kernels.

    python recipes/gpu_check/kernels.py [PROCESSES]        one by default; several compile side by side
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import sys
from functools import partial

import torch

from fw_fairseq.ops import FastWeightState, RowMap, fast_weight
from fw_fairseq.ops.kernels.families import find_family
from fw_fairseq.ops.vectors.pooling import pool
from fw_fairseq.ops.vectors.sru import sru
from fw_fairseq.rules import RULES

B, H, T, K, V = 2, 2, 37, 24, 40
MAPS = {"gated": RowMap("dpfp", 2, "sum"), "decay": RowMap("elu", 1, "l2"), "delta": RowMap("dpfp", 3, "sum")}
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
WINDOWS = (0, 3, 20)


def draw(rule: str, dtype: torch.dtype, row_map: RowMap) -> dict[str, torch.Tensor]:
    widths = {None: (), "K": (row_map.width(K),), "V": (V,)}
    x = {name: torch.randn(B, H, T, width, dtype=dtype) for name, width in zip("qkv", (K, K, V))}
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    return x | {name: torch.rand(B, H, T, *widths[gate.axis]) * 0.9 + 0.05 for name, gate in RULES[rule].gates.items()}


def placed(tensors: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    """As they are on a GPU, in float64 on the CPU."""
    return {n: x.detach().to(device, torch.float64 if device == "cpu" else None).requires_grad_() for n, x in tensors.items()}


def run(leaves: dict[str, torch.Tensor], rule: str, row_map: RowMap, state=None, backend="auto"):
    gates = {name: leaves[name] for name in RULES[rule].gates}
    return fast_weight(leaves["q"], leaves["k"], leaves["v"], rule, gates, state, backend, feature_map=row_map)


def results(leaves: dict[str, torch.Tensor], rule: str, row_map: RowMap, backend: str) -> list[torch.Tensor]:
    y, state = run(leaves, rule, row_map, backend=backend)
    loss = y.float().square().sum() + state.memory.square().sum()  # no mean, whose gradients fp16 cannot hold
    return [y, state.memory, *torch.autograd.grad(loss, list(leaves.values()))]


def check_rule(rule: str, dtype: torch.dtype, row_map: RowMap) -> float:
    """The largest error relative to the largest entry."""
    drawn = draw(rule, dtype, row_map)
    leaves, exact = placed(drawn, "cuda"), placed(drawn, "cpu")
    got, want = results(leaves, rule, row_map, "cuda"), results(exact, rule, row_map, "recurrent")
    with torch.no_grad():
        memory = got[1].detach()
        step = run({name: x[:, :, :1] for name, x in leaves.items()}, rule, row_map, FastWeightState(memory))
        state = FastWeightState(memory.cpu().double())
        true = run({name: x[:, :, :1] for name, x in exact.items()}, rule, row_map, state, "recurrent")
    return largest_error([*got, step[0], step[1].memory], [*want, true[0], true[1].memory])


def largest_error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """NaN where there is one."""
    errors = [(a.cpu().double() - b).abs().max() / b.abs().max().clamp(min=1e-12) for a, b in zip(got, want)]
    return torch.stack(errors).max().item()


def check_scan(form, operands: dict[str, torch.Tensor], *args, masks: dict[str, torch.Tensor]) -> float:
    """As ``check_rule``, of ``sru`` or ``pool``."""
    found = []
    for device, backend in (("cuda", "cuda"), ("cpu", "torch")):
        leaves = list(placed(operands, device).values())
        y, state = form(*leaves, *args, **{name: mask.to(device) for name, mask in masks.items()}, backend=backend)
        state = state if isinstance(state, torch.Tensor) else state.values
        loss = y.double().square().mean() + state.double().square().mean()
        found.append([y, state, *torch.autograd.grad(loss, leaves)])
    return largest_error(*found)


def check_sru(dtype: torch.dtype, masked: bool) -> float:
    steps = {name: torch.randn(T, B, width, dtype=dtype) for name, width in (("product", 3 * V), ("x", V))}
    unit = steps | {name: torch.randn(V) for name in ("v_forget", "v_reset")} | {"state": torch.randn(B, V)}
    return check_scan(sru, unit, masks=draw_masks(masked))


def check_pool(dtype: torch.dtype, window: int, masked: bool) -> float:
    operands = {"scores": torch.randn(B, H, T), "values": torch.randn(B, H, T, V, dtype=dtype)}
    return check_scan(pool, operands, window, masks=draw_masks(masked))


def draw_masks(masked: bool) -> dict[str, torch.Tensor]:
    return {name: torch.rand(B, T) < 0.1 for name in ("padding_mask", "reset_mask")} if masked else {}


def has_kernel(name: str) -> bool:
    """Whether kernels compute the rule; others with the same coefficients differ in how layers make their gates."""
    rule = RULES[name]
    return rule.plain and rule.step is None and find_family(rule.sample) is not None


def cases() -> dict[str, tuple]:
    """The tolerance and the check of each case, by its name."""
    found = {}
    mapped = [(rule, RowMap()) for rule in RULES if has_kernel(rule)] + list(MAPS.items())
    for dtype, tolerance in TOLERANCE.items():
        for rule, row_map in mapped:
            found[f"{rule} {'-'.join(map(str, row_map))} {dtype}"] = tolerance, partial(check_rule, rule, dtype, row_map)
        for masked in (False, True):
            masks = ", masks" if masked else ""
            found[f"sru{masks} {dtype}"] = tolerance, partial(check_sru, dtype, masked)
            for window in WINDOWS:
                found[f"pool, window {window}{masks} {dtype}"] = tolerance, partial(check_pool, dtype, window, masked)
    return found


def outcome(name: str) -> tuple[str, bool]:
    """A line that says how far off it is, or what went wrong; and whether it is well."""
    tolerance, check = cases()[name]
    torch.manual_seed(0)
    try:
        error = check()
    except Exception as failure:  # the other cases are worth knowing too
        return f"{name}: {type(failure).__name__}: {failure}", False
    well = error < tolerance
    return f"{name}: {error:.1e}" + ("" if well else f", above {tolerance:.0e}"), well


def main(processes: int) -> int:
    if processes > 1:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool_:
            outcomes = report(pool_.map(outcome, cases()))
    else:
        outcomes = report(map(outcome, cases()))
    failed = [line for line, well in outcomes if not well]
    print("\n".join([f"{len(failed)} of {len(outcomes)} went wrong", *failed]))
    return bool(failed)


def report(outcomes) -> list[tuple[str, bool]]:
    """Each printed as it comes, for the log of a run that is stopped."""
    found = []
    for line, well in outcomes:
        print(line, flush=True)
        found.append((line, well))
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
