"""Every rule through the kernels once, small, and some with a feature map or attention normalisation inside them: forward, backward
and one token against the step form; rows that read memories of sources; then the scans of SRU and of additive attention, and sparse
feed-forward layers, against PyTorch's. What they are compared with is computed on the CPU, so that compute-sanitizer sees little
but the kernels.

    python recipes/gpu_check/kernels.py [PROCESSES]        one by default; several compile side by side
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import sys
from functools import partial

import torch

from fw_fairseq.ops import FastWeightState, RowMap, fast_weight
from fw_fairseq.ops.kernels import step as kernel
from fw_fairseq.ops.kernels.recurrence import find_family
from fw_fairseq.ops.scans.pooling import pool
from fw_fairseq.ops.scans.sru import sru
from fw_fairseq.rules import RULES

try:
    from fw_fairseq.modules.sparse.gathered import feed_forward
except ImportError:  # without fairseq there are no sparse layers
    feed_forward = None

B, H, T, K, V = 2, 2, 37, 24, 40
MAPS = {"gated": RowMap("dpfp", 2, "sum"), "decay": RowMap("elu", 1, "l2"), "delta": RowMap("dpfp", 3, "sum")}
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
WINDOWS = (0, 3, 20)
NORMALISED = ("sum", "gated", "delta")
CHANNELS = ("kda", "gdn2", "rwkv7")  # decay per channel with erase; not plain, but the operation takes their gates as they are
EPS = 1e-3
DEVICE = "cuda"


def draw(rule: str, dtype: torch.dtype, row_map: RowMap, attention_norm: bool) -> dict[str, torch.Tensor]:
    widths = {None: (), "K": (row_map.width(K),), "V": (V,)}
    x = {name: torch.randn(B, H, T, width, dtype=dtype) for name, width in zip("qkv", (K, K, V))}
    if attention_norm:
        x["q"], x["k"] = x["q"].abs(), x["k"].abs()
    x["k"] = normalised(x["k"])
    gates = {name: torch.rand(B, H, T, *widths[gate.axis]) * 0.9 + 0.05 for name, gate in RULES[rule].gates.items()}
    return x | {name: normalised(gate) if RULES[rule].gates[name].form == "unit" else gate for name, gate in gates.items()}


def normalised(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def placed(tensors: dict[str, torch.Tensor], exact: bool) -> dict[str, torch.Tensor]:
    """As they are on the device, or exact, in float64 on the CPU."""
    where = ("cpu", torch.float64) if exact else (DEVICE, None)
    return {n: x.detach().to(*where).requires_grad_() for n, x in tensors.items()}


def run(leaves: dict[str, torch.Tensor], rule: str, state=None, **options):
    gates = {name: leaves[name] for name in RULES[rule].gates}
    return fast_weight(leaves["q"], leaves["k"], leaves["v"], rule, gates, state, **options)


def parts_of(state: FastWeightState) -> list[torch.Tensor]:
    return [x for x in state if x is not None]


def results(leaves: dict[str, torch.Tensor], rule: str, **options) -> tuple[list[torch.Tensor], FastWeightState]:
    y, state = run(leaves, rule, **options)
    loss = y.float().square().sum() + state.memory.square().sum()  # no mean, whose gradients fp16 cannot hold
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return [y, *parts_of(state), *gradients], state._map(lambda x: x.detach())


def check_rule(rule: str, dtype: torch.dtype, row_map: RowMap, attention_norm: bool = False) -> float:
    """The largest error relative to the largest entry."""
    drawn, options = draw(rule, dtype, row_map, attention_norm), {"feature_map": row_map, "attention_norm": attention_norm}
    leaves, exact = placed(drawn, False), placed(drawn, True)
    got, state = results(leaves, rule, backend="cuda", **options)
    want, _ = results(exact, rule, backend="recurrent", **options)
    with torch.no_grad():
        first = [{name: x[:, :, :1] for name, x in tensors.items()} for tensors in (leaves, exact)]
        y, after = run(first[0], rule, state, **options)
        true, true_after = run(first[1], rule, state._map(lambda x: x.cpu().double()), backend="recurrent", **options)
    return largest_error([*got, y, *parts_of(after)], [*want, true, *parts_of(true_after)])


def check_read(dtype: torch.dtype) -> float:
    """As ``check_rule``, of rows that read the memories of two sources where they lie."""
    q, memory, sums, order = (
        torch.rand(5, H, K, dtype=dtype),
        torch.randn(2, H, K, V),
        torch.rand(2, H, K),
        torch.tensor([1, 0, 1, 1, 0]),
    )
    given = [x.to(DEVICE) for x in (q, memory, sums, order)]
    y = kernel.read(*given, EPS, RowMap(), torch.empty(5, H, V, dtype=dtype, device=DEVICE))
    read = torch.einsum("rhk,rhkv->rhv", q.double(), memory.double()[order])
    divisor = (q.double() * sums.double()[order]).sum(-1, keepdim=True) + EPS
    return largest_error([y], [read / divisor])


def largest_error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """NaN where there is one."""
    errors = [(a.cpu().double() - b).abs().max() / b.abs().max().clamp(min=1e-12) for a, b in zip(got, want)]
    return torch.stack(errors).max().item()


def check_scan(form, operands: dict[str, torch.Tensor], *args, masks: dict[str, torch.Tensor]) -> float:
    """As ``check_rule``, of ``sru`` or ``pool``."""
    found = []
    for device, backend in ((DEVICE, "cuda"), ("cpu", "torch")):
        leaves = list(placed(operands, backend == "torch").values())
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


@torch.no_grad()
def check_sparse(dtype: torch.dtype, rows: int) -> float:
    shapes = (rows, 72), (12, 72), (192, 12), (192,), (192, 72), (192, 72), (72,)
    operands, block = [torch.randn(*shape).to(dtype) for shape in shapes], 16
    expected = feed_forward(*(x.double() for x in operands), block, torch.relu)
    return largest_error([feed_forward(*(x.to(DEVICE) for x in operands), block, torch.relu)], [expected])


def draw_masks(masked: bool) -> dict[str, torch.Tensor]:
    return {name: torch.rand(B, T) < 0.1 for name in ("padding_mask", "reset_mask")} if masked else {}


def has_kernel(name: str) -> bool:
    """Whether kernels compute the rule; others with the same coefficients differ in how layers make their gates."""
    rule = RULES[name]
    return name in CHANNELS or (rule.only_sigmoid_gates and rule.step is None and find_family(rule.sample) is not None)


def cases() -> dict[str, tuple]:
    """The tolerance and the check of each case, by its name."""
    found = {}
    mapped = [(rule, RowMap()) for rule in RULES if has_kernel(rule)] + list(MAPS.items())
    for dtype, tolerance in TOLERANCE.items():
        for rule, row_map in mapped:
            found[f"{rule} {'-'.join(map(str, row_map))} {dtype}"] = tolerance, partial(check_rule, rule, dtype, row_map)
        for rule in NORMALISED:
            found[f"attention norm of {rule} {dtype}"] = tolerance, partial(check_rule, rule, dtype, RowMap(), True)
        found[f"read {dtype}"] = tolerance, partial(check_read, dtype)
        for masked in (False, True):
            masks = ", masks" if masked else ""
            if feed_forward is not None:
                sparse = f"sparse feed-forward, {4 if masked else 1} rows {dtype}"
                found[sparse] = tolerance, partial(check_sparse, dtype, 4 if masked else 1)
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
