"""A kernel family without erase beside the definition in float64: outputs, final memory, every gradient."""

from __future__ import annotations

import torch
from hostcuda import EmulatorLaunch, Launch, Recorder

from fw_fairseq.feature_maps import AS_IS
from fw_fairseq.ops.kernels import launch
from fw_fairseq.ops.kernels.family import Operands
from fw_fairseq.ops.kernels.recurrence import choose_family, choose_precision, cuda_form, joined_decays
from fw_fairseq.ops.recurrent import step_form
from fw_fairseq.rules import RULES, Coefficients

from .draws import assert_same, draw_projections

# Of the largest entry, from inputs as rounded. Exact: fp32 sums in another order, gates' gradients differences of them.
TOLERANCE = {"exact": 2e-5, "tf32": 2e-3, "fp16": 2e-3, "bf16": 2e-2}
PRECISION = {torch.float32: "exact", torch.bfloat16: "bf16", torch.float16: "fp16"}
GATES = {
    "uniform": lambda *size: torch.rand(*size) * 0.98 + 0.01,
    "resets": lambda *size: torch.where(torch.rand(*size) < 0.1, 0.0, torch.rand(*size)),
    "small": lambda *size: torch.rand(*size) * 9e-3 + 1e-3,
    "tiny": lambda *size: torch.full(size, 1e-6),
    "near one": lambda *size: 1 - torch.rand(*size) * 1e-3,
    "lone": lambda *size: torch.where(torch.rand(*size) < 0.04, 10 ** (-2.7 - 2 * torch.rand(*size)), 1 - torch.rand(*size) * 1e-3),
    "both extremes": lambda *size: torch.where(torch.rand(*size) < 0.5, 1e-6, 1 - 1e-6),
}


def draw(rule: str, shape, dtype=torch.float32, gates="uniform") -> dict[str, torch.Tensor | None]:
    """q, k, v as views of (T,B,C) projections."""
    B, H, T, K, V = shape
    q, k, v = (x.to(dtype) for x in draw_projections(B, H, T, K, K, V))
    drawn = {name: GATES[gates](*gate.shape((B, H, T, K, V))) for name, gate in RULES[rule].gates.items()}
    coefficients = RULES[rule].coefficients(**drawn)._asdict()
    return {"q": q, "k": k / K**0.5, "v": v} | coefficients | {"memory": torch.randn(B, H, K, V)}


def by_kernels(family, x: dict, dy, dmemory, precision: str, launcher) -> dict[str, torch.Tensor]:
    y, final, saved = family.forward(launcher, Operands(*x.values(), precision))
    kept = family.saved_like(Operands(*x.values(), precision))
    assert [(tuple(t.shape), t.dtype) for t in saved] == [(tuple(shape), dtype) for shape, dtype in kept]
    grads = family.backward(launcher, Operands(*x.values(), precision), saved, dy, dmemory)
    for operand, grad in zip(x.values(), grads):
        assert (grad is None) == (operand is None)
        assert grad is None or (grad.dtype, grad.stride()) == (operand.dtype, torch.empty_like(operand).stride())
    grads = {f"gradient of {name}": grad for name, grad in zip(x, grads) if grad is not None}
    return {"y": y, "final memory": final} | grads


def to_run(q, k, v, *coefficients, row_map=AS_IS) -> Operands:
    """The operands of a call from an empty memory."""
    memory = torch.empty(*q.shape[:2], row_map.width(q.shape[3]), v.shape[3], device="meta")
    return Operands(q, k, v, *coefficients, memory, PRECISION[q.dtype], row_map)


def by_family(q, k, v, coefficients: Coefficients, memory) -> tuple[torch.Tensor, torch.Tensor]:
    """The family that computes these coefficients, as a form."""
    x = joined_decays(Operands(q, k, v, *coefficients, memory, choose_precision(v.dtype)))
    name, reason = choose_family(x)
    assert reason is None
    return cuda_form(name, x)


def by_definition(x: dict, dy, dmemory) -> dict[str, torch.Tensor]:
    leaves = {name: None if operand is None else operand.double().requires_grad_() for name, operand in x.items()}
    coefficients = Coefficients(*(leaves[name] for name in "fzew"))
    y, final = step_form(leaves["q"], leaves["k"], leaves["v"], coefficients, leaves["memory"])
    present = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    grads = torch.autograd.grad((y, final), list(present.values()), (dy.double(), dmemory.double()))
    return {"y": y.detach(), "final memory": final.detach()} | {f"gradient of {n}": g for n, g in zip(present, grads)}


def compare(family, rule: str, shape, dtype=torch.float32, launcher=None, precision=None, gates="uniform") -> None:
    x = draw(rule, shape, dtype, gates)
    dy, dmemory = torch.randn_like(x["v"]), torch.randn_like(x["memory"])
    precision = precision or PRECISION[dtype]
    with launch.use(launcher or EmulatorLaunch()) as launcher:
        actual = by_kernels(family, x, dy, dmemory, precision, launcher)
    assert_same(actual, by_definition(x, dy, dmemory), TOLERANCE[precision])


def launches(family, rule: str, shape, dtype, capability=(9, 0), processors: int = 1) -> list[Launch]:
    """What would be launched on a device, without running it."""
    x, precision = draw(rule, shape, dtype), PRECISION[dtype]
    with launch.use(Recorder(capability, processors)) as recorder:
        _, _, saved = family.forward(recorder, Operands(*x.values(), precision))
        family.backward(recorder, Operands(*x.values(), precision), saved, x["v"], x["memory"])
    return recorder.launches
