"""Every rule through the kernels once, small, and some with a feature map inside them: forward, backward and one token against the
step form; then the scans of SRU and of additive attention against PyTorch's in float64. For compute-sanitizer."""

from __future__ import annotations

import torch

from fw_fairseq.ops import FastWeightState, RowMap, fast_weight
from fw_fairseq.ops.pooling import pool
from fw_fairseq.ops.sru import sru
from fw_fairseq.rules import RULES

B, H, T, K, V = 2, 2, 37, 24, 40
MAPS = {"gated": RowMap("dpfp", 2, "sum"), "decay": RowMap("elu", 1, "l2"), "delta": RowMap("dpfp", 3, "sum")}
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def draw(rule: str, dtype: torch.dtype, row_map: RowMap) -> dict[str, torch.Tensor]:
    widths = {None: (), "K": (row_map.width(K),), "V": (V,)}
    x = {name: torch.randn(B, H, T, width, device="cuda", dtype=dtype) for name, width in zip("qkv", (K, K, V))}
    x["k"] = torch.nn.functional.normalize(x["k"], dim=-1)
    x |= {name: torch.rand(B, H, T, *widths[gate.axis], device="cuda") * 0.9 + 0.05 for name, gate in RULES[rule].gates.items()}
    return {name: t.requires_grad_() for name, t in x.items()}


def run(leaves: dict[str, torch.Tensor], rule: str, row_map: RowMap, state=None, backend="auto"):
    gates = {name: leaves[name] for name in RULES[rule].gates}
    return fast_weight(leaves["q"], leaves["k"], leaves["v"], rule, gates, state, backend, feature_map=row_map)


def results(leaves: dict[str, torch.Tensor], rule: str, row_map: RowMap, backend: str) -> list[torch.Tensor]:
    y, state = run(leaves, rule, row_map, backend=backend)
    loss = y.float().square().sum() + state.memory.square().sum()  # no mean, whose gradients fp16 cannot hold
    return [y, state.memory, *torch.autograd.grad(loss, list(leaves.values()))]


def check(rule: str, dtype: torch.dtype, row_map: RowMap) -> float:
    """The largest error relative to the largest entry."""
    leaves = draw(rule, dtype, row_map)
    exact = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    got, want = results(leaves, rule, row_map, "cuda"), results(exact, rule, row_map, "recurrent")
    with torch.no_grad():
        now = {name: x[:, :, :1] for name, x in leaves.items()}
        state = FastWeightState(got[1].detach())
        step = run(now, rule, row_map, state)
        now = {name: x.double() for name, x in now.items()}
        state = FastWeightState(state.memory.double())
        true = run(now, rule, row_map, state, "recurrent")
    pairs = [*zip(got, want), (step[0], true[0]), (step[1].memory, true[1].memory)]
    return max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def check_scan(form, operands: list[torch.Tensor], *args, **masks) -> float:
    """As ``check``, of ``sru`` or ``pool``."""
    found = []
    for backend, dtype in (("cuda", None), ("torch", torch.float64)):
        leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in operands]
        y, state = form(*leaves, *args, **masks, backend=backend)
        state = state if isinstance(state, torch.Tensor) else state.values
        loss = y.double().square().mean() + state.double().square().mean()
        found.append([y, state, *torch.autograd.grad(loss, leaves)])
    return max(((a.double() - b).abs().max() / b.abs().max()).item() for a, b in zip(*found))


def scans(dtype: torch.dtype) -> dict[str, float]:
    steps = [torch.randn(T, B, width, device="cuda", dtype=dtype) for width in (3 * V, V)]
    unit = [*steps, *torch.randn(2, V, device="cuda"), torch.randn(B, V, device="cuda")]
    pooled = [torch.randn(B, H, T, device="cuda"), torch.randn(B, H, T, V, device="cuda", dtype=dtype)]
    masks = {name: torch.rand(B, T, device="cuda") < 0.1 for name in ("padding_mask", "reset_mask")}
    errors = {"sru": check_scan(sru, unit), "sru, masks": check_scan(sru, unit, **masks)}
    for window in (0, 3, 20):
        errors[f"pool, window {window}"] = check_scan(pool, pooled, window)
        errors[f"pool, window {window}, masks"] = check_scan(pool, pooled, window, **masks)
    return errors


def main() -> None:
    cases = [(rule, RowMap()) for rule, spec in RULES.items() if spec.step is None] + list(MAPS.items())
    for rule, row_map in cases:
        for dtype, tolerance in TOLERANCE.items():
            error = check(rule, dtype, row_map)
            case = f"{rule} {'-'.join(map(str, row_map))} {dtype}: {error:.1e}"
            print(case)
            assert error < tolerance, f"{case} above {tolerance:.0e}"
    for dtype, tolerance in TOLERANCE.items():
        for name, error in scans(dtype).items():
            print(f"{name} {dtype}: {error:.1e}")
            assert error < tolerance, f"{name} {dtype}: {error:.1e} above {tolerance:.0e}"


if __name__ == "__main__":
    main()
