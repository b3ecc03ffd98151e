"""The decoding kernel on the emulator, against one step of the definition."""

from __future__ import annotations

import pytest
import torch
from hostcuda import SCHEDULES, guarded, sanitized_launch
from hostcuda.nvrtc import ARCHITECTURES, compile_check
from support.emulated import emulated
from support.kernel_rules import STEP_RULES

from fw_fairseq.feature_maps import AS_IS, RowMap
from fw_fairseq.ops import fast_weight
from fw_fairseq.ops.kernels import step as cuda_step
from fw_fairseq.ops.recurrent import step as one_step
from fw_fairseq.rules import RULES

COEFFICIENTS = ["", "w", "fw", "Fz", "ew", "few", "FE", "Fzew"]  # F, E: per key
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # y is rounded once to the type


def draw(present: str, key: int, value: int, dtype=torch.float32, batch=2, heads=2) -> dict[str, torch.Tensor | None]:
    """Views with strides of their own, as the projections of a layer are."""
    size = {"f": (), "F": (key,), "z": (value,), "e": (), "E": (key,), "w": ()}
    drawn = {name: torch.randn(heads, batch, width).to(dtype).transpose(0, 1) for name, width in zip("qkv", (key, key, value))}
    drawn |= {name: None for name in "fzew"}
    drawn |= {name.lower(): torch.rand(heads, batch, *size[name]).transpose(0, 1) for name in present}
    return drawn | {"memory": torch.randn(batch, heads, key, value)}


def compare(inputs, y, memory):
    exact = {name: None if x is None else x.double() for name, x in inputs.items()}
    want_y, want_memory = one_step(exact.pop("memory"), **exact)
    assert y.dtype == inputs["v"].dtype
    torch.testing.assert_close(memory.double(), want_memory, rtol=1e-5, atol=1e-5)
    scale = want_y.abs().max().item()
    torch.testing.assert_close(y.double(), want_y, rtol=0, atol=TOLERANCE[y.dtype] * scale)


@pytest.mark.parametrize("present", COEFFICIENTS)
def test_equals_one_step(emulate, present):
    emulate(bounds=True)
    inputs = draw(present, 20, 40)
    compare(inputs, *cuda_step.step(**inputs))


@pytest.mark.parametrize("policy, seed", SCHEDULES)
def test_any_schedule(emulate, policy, seed):
    emulate(policy, seed)
    inputs = draw("Fzew", 40, 33)
    compare(inputs, *cuda_step.step(**inputs))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("key, value", [(1, 1), (16, 64), (130, 32), (512, 7)])
def test_widths_and_dtypes(emulate, key, value, dtype):
    emulate()
    inputs = draw("few", key, value, dtype, batch=1)
    compare(inputs, *cuda_step.step(**inputs))


def test_in_place(emulate):
    launcher = emulate()
    inputs = draw("few", 20, 40)
    memory, y = inputs["memory"].clone(), torch.empty(2, 2, 40)
    given = cuda_step.step(**inputs | {"memory": memory}, y=y, memory_out=memory)
    compare(inputs, y, memory)
    assert given[0] is y and given[1] is memory and len(launcher.calls) == 1


def test_rows_in_another_order(emulate):
    """As many rows as the order names, from a memory that has more or fewer."""
    emulate(bounds=True)
    for order in (torch.tensor([1, 1, 0]), torch.tensor([1])):
        inputs, memory = draw("fzew", 20, 40, batch=len(order)), torch.randn(2, 2, 20, 40)
        found = cuda_step.step(**inputs | {"memory": memory}, order=order)
        compare(inputs | {"memory": memory[order]}, *found)


def test_nothing_past_the_end(emulate):
    emulate()
    inputs = {name: None if x is None else guarded(x) for name, x in draw("Fzew", 20, 40).items()}
    compare(inputs, *cuda_step.step(**inputs, y=guarded(torch.zeros(2, 2, 40)), memory_out=guarded(inputs["memory"])))


def sanitized() -> None:
    inputs = draw("Fzew", 20, 40)
    with emulated(sanitized_launch()):
        compare(inputs, *cuda_step.step(**inputs))
        compare_read(*draw_read(20, 40), torch.empty(4, 2, 40))


@pytest.mark.parametrize("rule", STEP_RULES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_decoding_uses_it(emulate, rule, dtype):
    """Through the public op: "auto" with one token and no gradients, the state handed on."""
    gates = {n: torch.rand(g.shape((2, 2, 3, 8, 6))) for n, g in RULES[rule].gates.items()}
    q, k, v = (torch.randn(2, 2, 3, width).to(dtype) for width in (8, 8, 6))
    expected, end = fast_weight(q, k, v, rule, gates)
    launcher, state, outputs = emulate(), None, []
    for t in range(3):
        now = slice(t, t + 1)
        y, state = fast_weight(*(x[:, :, now] for x in (q, k, v)), rule, {n: g[:, :, now] for n, g in gates.items()}, state)
        outputs.append(y)
    assert [call[1] for call in launcher.calls] == ["step"] * 3
    torch.testing.assert_close(torch.cat(outputs, 2), expected, rtol=0, atol=TOLERANCE[dtype] * 5)
    torch.testing.assert_close(state.memory, end.memory, rtol=1e-4, atol=1e-4)


def test_gradients_take_another_form(emulate):
    launcher = emulate()
    q, k, v = (torch.randn(1, 1, 1, 4, requires_grad=True) for _ in range(3))
    fast_weight(q, k, v, "sum")[0].sum().backward()
    assert "step" not in [call[1] for call in launcher.calls] and q.grad is not None


def test_opcheck(emulate):
    emulate()
    inputs = draw("few", 8, 6)
    torch.library.opcheck(torch.ops.fw_fairseq.step.default, (*inputs.values(), None, 0.0, 0.0, *AS_IS))


# The most rows take the most registers; the others are compiled for one architecture.
@pytest.mark.parametrize(
    "rows, arch", [(cuda_step.ROWS[-1], arch) for arch in ARCHITECTURES] + [(r, "80") for r in cuda_step.ROWS[:-1]]
)
def test_compiles_without_spills(rows, arch):
    x = torch.empty(1, 1, 1)
    for dtype in cuda_step.TYPES:
        macros = cuda_step.defines(dtype, x, x, x, x, rows) | {"FW_SUMS": 1}
        found = compile_check("step.cu", macros, arch)["step"]
        assert found["spill_stores"] == found["spill_loads"] == 0 and found["registers"] <= 128, (dtype, found)


def draw_read(key: int, value: int, dtype=torch.float32, rows=4, sources=2):
    q = torch.rand(2, rows, key).to(dtype).transpose(0, 1)
    return q, torch.randn(sources, 2, key, value), torch.rand(sources, 2, key), torch.tensor([1, 1, 0, 1])[:rows]


def compare_read(q, memory, sums, order, y, eps=1e-3):
    y = cuda_step.read(q, memory, sums, order, eps, AS_IS, y)
    for row, source in enumerate(order.tolist()):
        for head in range(2):
            want = memory[source, head].double().T @ q[row, head].double()
            if sums is not None:
                want = want / (sums[source, head].double() @ q[row, head].double() + eps)
            torch.testing.assert_close(y[row, head].double(), want, rtol=0, atol=TOLERANCE[y.dtype] * want.abs().max().item())


@pytest.mark.cases_in_ci(3)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("key, value", [(1, 1), (20, 40), (130, 32), (512, 7)])
def test_reading_widths_and_dtypes(emulate, key, value, dtype):
    """In fp32 and without sums, too; queries and outputs of two types."""
    emulate(bounds=True)
    q, memory, sums, order = draw_read(key, value, dtype)
    compare_read(q, memory, sums, order, torch.empty(4, 2, value, dtype=dtype))
    compare_read(q.float(), memory, None, order, torch.empty(4, 2, value, dtype=dtype))


def test_reading_nothing_gives_zero(emulate):
    emulate(bounds=True)
    q, memory, sums, order = draw_read(8, 6)
    y = cuda_step.read(torch.zeros_like(q), memory, sums, order, 0.0, AS_IS, torch.empty(4, 2, 6))
    assert y.eq(0).all()


@pytest.mark.parametrize("policy, seed", SCHEDULES)
def test_reading_in_any_schedule(emulate, policy, seed):
    emulate(policy, seed)
    q, memory, sums, order = draw_read(40, 33)
    compare_read(*map(guarded, (q, memory, sums, order)), guarded(torch.zeros(4, 2, 33)))


def test_reading_maps_rows(emulate):
    emulate(bounds=True)
    row_map, (q, _, _, order) = RowMap("dpfp", 2, "sum"), draw_read(6, 10)
    memory, sums = torch.randn(2, 2, 24, 10), torch.rand(2, 2, 24)
    mapped, y = cuda_step.read(q, memory, sums, order, 1e-3, row_map, torch.empty(4, 2, 10)), torch.empty(4, 2, 10)
    torch.testing.assert_close(mapped, cuda_step.read(row_map(q), memory, sums, order, 1e-3, AS_IS, y))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_reading_compiles_without_spills(arch):
    macros = {"FW_IN": "__nv_bfloat16", "FW_OUT": "__nv_bfloat16", "FW_SUMS": 1, "FW_ROWS": 32, "FW_MAP": 4, "FW_NORM": 1}
    found = compile_check("read.cu", macros | {"FW_D": 64, "FW_NU": 2}, arch)["read_memory"]
    assert found["spill_stores"] == found["spill_loads"] == 0 and found["registers"] <= 128, found
