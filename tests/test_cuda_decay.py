"""The kernels for rules without erase on the emulator, against the definition in float64: outputs, final memory, every gradient."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from conftest import assert_same
from hostcuda import SCHEDULES, EmulatorLaunch, guarded, run_sanitized, sanitized_launch
from hostcuda.nvrtc import compile_check

from fw_fairseq.ops import cuda_decay
from fw_fairseq.ops.recurrent import step_form
from fw_fairseq.rules import RULES, Coefficients

WITHOUT_ERASE = ["sum", "gated", "decay"]
# Of the largest entry, from inputs as rounded. Exact: fp32 sums in another order, gates' gradients differences of them.
TOLERANCE = {"exact": 2e-5, "tf32": 2e-3, "bf16": 2e-2}
PRECISION = {torch.float32: "exact", torch.bfloat16: "bf16", torch.float16: "bf16"}
GATES = {
    "uniform": lambda *size: torch.rand(*size) * 0.98 + 0.01,
    "resets": lambda *size: torch.where(torch.rand(*size) < 0.1, 0.0, torch.rand(*size)),
    "small": lambda *size: torch.rand(*size) * 9e-3 + 1e-3,
    "tiny": lambda *size: torch.full(size, 1e-6),
    "near one": lambda *size: 1 - torch.rand(*size) * 1e-3,
    "both extremes": lambda *size: torch.where(torch.rand(*size) < 0.5, 1e-6, 1 - 1e-6),
}


def draw(rule: str, shape, dtype=torch.float32, gates="uniform") -> dict[str, torch.Tensor | None]:
    """q, k, v as views of (T,B,C) projections."""
    B, H, T, K, V = shape
    q, k, v = (torch.randn(T, B, H * width).view(T, B, H, width).permute(1, 2, 0, 3).to(dtype) for width in (K, K, V))
    sizes = {None: (), "K": (K,), "V": (V,)}
    drawn = {name: GATES[gates](B, H, T, *sizes[gate.axis]) for name, gate in RULES[rule].gates.items()}
    coefficients = RULES[rule].coefficients(**drawn)._asdict()
    return {"q": q, "k": k / K**0.5, "v": v} | coefficients | {"memory": torch.randn(B, H, K, V)}


def by_kernels(x: dict, dy, dmemory, precision: str, launch) -> dict[str, torch.Tensor]:
    y, final, saved = cuda_decay.forward(launch, *x.values(), precision)
    kept = cuda_decay.saved_like(*x.values(), precision)
    assert [(tuple(t.shape), t.dtype) for t in saved] == [(tuple(shape), dtype) for shape, dtype in kept]
    grads = cuda_decay.backward(launch, *x.values(), saved, dy, dmemory, precision)
    for operand, grad in zip(x.values(), grads):
        assert (grad is None) == (operand is None)
        assert grad is None or (grad.dtype, grad.stride()) == (operand.dtype, torch.empty_like(operand).stride())
    grads = {f"gradient of {name}": grad for name, grad in zip(x, grads) if grad is not None}
    return {"y": y, "final memory": final} | grads


def by_definition(x: dict, dy, dmemory) -> dict[str, torch.Tensor]:
    leaves = {name: None if operand is None else operand.double().requires_grad_() for name, operand in x.items()}
    coefficients = Coefficients(*(leaves[name] for name in "fzew"))
    y, final = step_form(leaves["q"], leaves["k"], leaves["v"], coefficients, leaves["memory"])
    present = {name: leaf for name, leaf in leaves.items() if leaf is not None}
    grads = torch.autograd.grad((y, final), list(present.values()), (dy.double(), dmemory.double()))
    return {"y": y.detach(), "final memory": final.detach()} | {f"gradient of {n}": g for n, g in zip(present, grads)}


def compare(rule, shape, dtype=torch.float32, launch=None, precision=None, gates="uniform"):
    x = draw(rule, shape, dtype, gates)
    dy, dmemory = torch.randn_like(x["v"]), torch.randn_like(x["memory"])
    precision = precision or PRECISION[dtype]
    actual = by_kernels(x, dy, dmemory, precision, launch or EmulatorLaunch())
    assert_same(actual, by_definition(x, dy, dmemory), TOLERANCE[precision])


@pytest.mark.parametrize("policy, seed", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_schedule(one_thread, dtype, policy, seed):
    compare("decay", (2, 1, 70, 64, 64), dtype, EmulatorLaunch(policy, seed))


@pytest.mark.parametrize("tokens", [1, 5, 16, 17, 70])
@pytest.mark.parametrize("rule", WITHOUT_ERASE)
def test_any_length(one_thread, rule, tokens):
    compare(rule, (1, 2, tokens, 32, 32))


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("rule", ["gated", "decay"])
def test_any_gate(one_thread, rule, gates):
    """Of 0, near 0 and near 1: the gradients of the gates too, over many chunks."""
    compare(rule, (1, 1, 200, 32, 32), gates=gates)


@pytest.mark.parametrize("gates", GATES)
def test_any_gate_bf16(one_thread, gates):
    compare("decay", (1, 1, 200, 64, 64), torch.bfloat16, gates=gates)


# Widths of one tile and of several, padded ones, keys shared by several warps, every type.
@pytest.mark.parametrize(
    "rule, K, V, dtype",
    [
        ("decay", 16, 16, torch.float16),
        ("sum", 20, 35, torch.float32),
        ("decay", 21, 36, torch.bfloat16),
        ("gated", 128, 128, torch.bfloat16),
        ("decay", 64, 128, torch.bfloat16),
        ("decay", 256, 32, torch.bfloat16),
    ],
)
def test_widths_and_dtypes(one_thread, rule, K, V, dtype):
    compare(rule, (1, 2, 37, K, V), dtype)


def test_tf32(one_thread):
    compare("decay", (1, 1, 37, 32, 32), precision="tf32")


def test_nothing_outside_the_tensors(one_thread):
    x = {name: None if t is None else guarded(t) for name, t in draw("decay", (1, 1, 19, 20, 18)).items()}
    dy, dmemory = guarded(torch.randn_like(x["v"])), guarded(torch.randn_like(x["memory"]))
    actual = by_kernels(x, dy, dmemory, "exact", EmulatorLaunch(bounds=True))
    assert_same(actual, by_definition(x, dy, dmemory), TOLERANCE["exact"])


def run_tiny() -> None:
    torch.set_num_threads(1)
    x = draw("decay", (1, 1, 33, 32, 32), torch.bfloat16, "resets")
    by_kernels(x, torch.randn_like(x["v"]), torch.randn_like(x["memory"]), "bf16", sanitized_launch())


def test_no_races():
    run_sanitized("thread", "test_cuda_decay:run_tiny")


@pytest.mark.parametrize("arch", ["80", "86", "89", "90", "100", "120"])
@pytest.mark.parametrize("width, dtype", [(64, torch.bfloat16), (128, torch.bfloat16), (64, torch.float32)])
def test_compiles_without_spills(width, dtype, arch):
    for launched in launches("decay", (1, 1, 17, width, width), dtype):
        used = compile_check(launched.source, launched.defines, arch)[launched.kernel]
        assert (used["spill_stores"], used["spill_loads"]) == (0, 0), used


def launches(rule, shape, dtype) -> list[SimpleNamespace]:
    """What would be launched, without running it."""
    seen = []

    def record(source, kernel, defines, *rest):
        seen.append(SimpleNamespace(source=source, kernel=kernel, defines=defines))

    x, precision = draw(rule, shape, dtype), PRECISION[dtype]
    _, _, saved = cuda_decay.forward(record, *x.values(), precision)
    cuda_decay.backward(record, *x.values(), saved, x["v"], x["memory"], precision)
    return seen
