"""The kernels for rules without erase on the emulator, against the definition in float64: outputs, final memory, every gradient."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hostcuda import SCHEDULES, EmulatorLaunch, guarded, sanitized_launch
from hostcuda.nvrtc import ARCHITECTURES, compile_check
from support.draws import assert_same, draw_projections
from support.emulated import emulated

from fw_fairseq.ops import fast_weight
from fw_fairseq.ops.kernels import common, decay
from fw_fairseq.ops.recurrent import step_form
from fw_fairseq.row_map import AS_IS
from fw_fairseq.rules import RULES, Coefficients

WITHOUT_ERASE = ["sum", "gated", "decay"]
# Of the largest entry, from inputs as rounded. Exact: fp32 sums in another order, gates' gradients differences of them.
TOLERANCE = {"exact": 2e-5, "tf32": 2e-3, "bf16": 2e-2}
PRECISION = {torch.float32: "exact", torch.bfloat16: "bf16", torch.float16: "tf32"}
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
    q, k, v = (x.to(dtype) for x in draw_projections(B, H, T, K, K, V))
    drawn = {name: GATES[gates](*gate.shape((B, H, T, K, V))) for name, gate in RULES[rule].gates.items()}
    coefficients = RULES[rule].coefficients(**drawn)._asdict()
    return {"q": q, "k": k / K**0.5, "v": v} | coefficients | {"memory": torch.randn(B, H, K, V)}


def by_kernels(x: dict, dy, dmemory, precision: str, launch) -> dict[str, torch.Tensor]:
    y, final, saved = decay.forward(launch, *x.values(), precision)
    kept = decay.saved_like(*x.values(), precision)
    assert [(tuple(t.shape), t.dtype) for t in saved] == [(tuple(shape), dtype) for shape, dtype in kept]
    grads = decay.backward(launch, *x.values(), saved, dy, dmemory, precision)
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
        ("decay", 512, 16, torch.bfloat16),
        ("gated", 300, 20, torch.float32),
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


def test_large_operands(one_thread):
    """Gates that nearly need the chunks' rounds, with entries as large as fp16's: no infinity on the way."""
    x = draw("decay", (1, 1, 33, 16, 16))
    x["f"], x["z"] = torch.full_like(x["f"], 0.0101), torch.full_like(x["z"], 0.0101)
    x["k"], x["v"] = x["k"] * 1e3, x["v"] * 3e4
    dy, dmemory = torch.randn_like(x["v"]), torch.randn_like(x["memory"])
    actual = by_kernels(x, dy, dmemory, "exact", EmulatorLaunch())
    assert_same(actual, by_definition(x, dy, dmemory), TOLERANCE["exact"])


@pytest.mark.parametrize("rule, attention_norm", [("sum", True), ("gated", False), ("decay", False)])
def test_public_op(emulate, rule, attention_norm):
    """Through fast_weight: padding, resets, a state, attention normalisation; and that the kernels ran."""
    launcher = emulate()
    batch, tokens = 2, 37
    x = draw("sum", (batch, 1, tokens, 32, 32))
    leaves = {n: x[n].abs() + 0.1 if attention_norm else x[n] for n in "qkv"}
    gates = {n: GATES["uniform"](batch, 1, tokens, *(() if g.axis is None else (32,))) for n, g in RULES[rule].gates.items()}
    leaves = {n: t.detach().requires_grad_() for n, t in (leaves | gates).items()}
    masks = {"padding_mask": torch.rand(batch, tokens) < 0.2, "reset_mask": torch.rand(batch, tokens) < 0.1}

    def results(backend):
        called = {n: leaves[n] for n in gates}
        y, state = fast_weight(*(leaves[n] for n in "qkv"), rule, called, backend=backend, attention_norm=attention_norm, **masks)
        torch.manual_seed(1)
        grads = torch.autograd.grad((y, state.memory), list(leaves.values()), (torch.randn_like(y), torch.randn_like(state.memory)))
        return {"y": y.detach(), "memory": state.memory.detach()} | dict(zip(leaves, grads))

    assert_same(results("cuda"), results("recurrent"), 2e-5)
    assert [call[1] for call in launcher.calls] == ["decay_forward", "decay_backward"]


def test_without_gradients_nothing_is_kept(one_thread):
    x = draw("decay", (1, 1, 70, 32, 32)).values()
    y, final, saved = decay.forward(EmulatorLaunch(), *x, "exact", keep=False)
    want_y, want_final, _ = decay.forward(EmulatorLaunch(), *x, "exact", keep=True)
    assert saved == () and torch.equal(y, want_y) and torch.equal(final, want_final)


def test_symbolic_shapes(emulate):
    emulate()
    q, k, v, f, z, e, w, memory = draw("decay", (1, 2, 17, 32, 32)).values()
    torch.library.opcheck(torch.ops.fw_fairseq.scan.default, (q, k, v, f, z, e, w, memory.requires_grad_(), "exact", True, *AS_IS))


def sanitized() -> None:
    with emulated(sanitized_launch()) as launch:
        x = draw("decay", (1, 1, 33, 32, 32), torch.bfloat16, "resets")
        by_kernels(x, torch.randn_like(x["v"]), torch.randn_like(x["memory"]), "bf16", launch)


@pytest.mark.parametrize(
    "capability, key, dtype, message",
    [
        ((9, 0), 513, torch.bfloat16, "for keys up to 512 wide, not 513"),
        ((7, 5), 64, torch.float16, "for compute capability 8.0 and higher only"),
        ((8, 9), 512, torch.float32, "this device has 101376"),
        ((9, 0), 512, torch.bfloat16, None),
        ((9, 0), 384, torch.float32, None),
        ((9, 0), 512, torch.float32, "this device has 232448"),
        ((8, 9), 128, torch.float32, None),
    ],
)
def test_what_has_no_kernel(emulate, monkeypatch, capability, key, dtype, message):
    monkeypatch.setattr(emulate(), "capability", lambda device: capability)
    q = torch.empty(1, 1, 2, key, dtype=dtype)
    reason = decay.supported(q, q, q, q, q, None, None)
    assert reason is None if message is None else reason.startswith("backend='cuda' ") and message in reason


MAIN = [torch.bfloat16, torch.float32]
COMPILED = [(arch, 64, dtype) for arch in ARCHITECTURES if arch != "75" for dtype in MAIN]
COMPILED += [(arch, width, dtype) for arch, width in (("90", 32), ("80", 128), ("90", 128)) for dtype in MAIN]


@pytest.mark.parametrize("arch, width, dtype", COMPILED)
def test_compiles_without_spills(arch, width, dtype):
    for launched in launches("decay", (1, 1, 17, width, width), dtype):
        found = compile_check(launched.source, launched.defines, arch)[launched.kernel]
        most = 0 if arch in ("80", "90") else 8  # bytes; sm_120 spills a register
        assert max(found["spill_stores"], found["spill_loads"], found["stack"]) <= most, (launched.kernel, found)
        assert launched.defines["FW_SHARED"] <= common.SHARED


@pytest.mark.parametrize("rule", ["sum", "gated"])
def test_odd_lengths_take_the_same_kernels(rule):
    """Gates per token are moved one by one: their rows need not be even."""
    odd, even = (launches(rule, (1, 1, tokens, 64, 64), torch.bfloat16) for tokens in (511, 512))
    assert [call.defines for call in odd] == [call.defines for call in even]


def launches(rule, shape, dtype) -> list[SimpleNamespace]:
    """What would be launched, without running it."""
    seen = []

    def record(source, kernel, defines, *rest):
        seen.append(SimpleNamespace(source=source, kernel=kernel, defines=defines))

    x, precision = draw(rule, shape, dtype), PRECISION[dtype]
    _, _, saved = decay.forward(record, *x.values(), precision)
    decay.backward(record, *x.values(), saved, x["v"], x["memory"], precision)
    return seen
