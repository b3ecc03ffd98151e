"""The kernels of the SRU scan on the emulator, against its equations in float64."""

from __future__ import annotations

import pytest
import torch
from hostcuda import SCHEDULES, Recorder, guarded, sanitized_launch
from hostcuda.nvrtc import ARCHITECTURES, compile_check
from support.cuda_sru import TOLERANCE, compare, draw, results
from support.definitions import by_the_equations
from support.draws import assert_same
from support.emulated import emulated

from fw_fairseq.ops.scans import sru_kernel as cuda_sru
from fw_fairseq.ops.scans.sru import sru

MASKS = [(False, False), (True, False), (False, True), (True, True)]  # padding, resets


@pytest.mark.parametrize("padded, with_resets", MASKS)
@pytest.mark.parametrize("length", [1, 7, 8, 9, 20])
def test_outputs_states_and_gradients_are_those_of_the_equations(emulate, length, padded, with_resets):
    launcher = emulate(bounds=True)
    compare(draw(length, 3, 21), padded, with_resets)
    assert [(kernel, macros["FW_STEPS"]) for _, kernel, macros in launcher.calls] == [("sru_forward", 8), ("sru_backward", 8)]
    assert launcher.calls[0][2] == launcher.calls[1][2], "both are compiled at once"


@pytest.mark.parametrize("policy, seed", SCHEDULES)
def test_any_schedule(emulate, policy, seed):
    emulate(policy, seed)
    compare(draw(17, 2, 40), True, True)


@pytest.mark.parametrize("x_dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_dtypes(emulate, dtype, x_dtype):
    """Those of u and of x differ under autocast."""
    emulate()
    inputs = draw(10, 2, 16, dtype)
    inputs[1] = inputs[1].to(x_dtype)
    got = results(sru, inputs, backend="cuda")
    expected = results(by_the_equations, [x.double() for x in inputs])
    assert_same(got, expected, max(TOLERANCE[dtype], TOLERANCE[x_dtype]))
    assert (got["h"].dtype, got["c"].dtype, got["product"].dtype, got["x"].dtype) == (dtype, torch.float32, dtype, x_dtype)


def test_far_from_zero(emulate):
    """Gates that are 0 or 1 to the last bit, and exponentials that overflow."""
    emulate()
    inputs = draw(12, 2, 8)
    inputs[0][..., 8:] *= 100
    compare(inputs)


def test_only_what_is_asked_for(emulate):
    """The public op without gradients keeps nothing, and "auto" finds the kernels."""
    launcher = emulate()
    inputs = draw(5, 2, 8)
    h, c = sru(*inputs)
    assert_same({"h": h, "c": c}, dict(zip("hc", sru(*inputs, backend="torch"))), 1e-5)
    assert [(kernel, macros["FW_KEEP"]) for _, kernel, macros in launcher.calls] == [("sru_forward", 0)]
    c = sru(*inputs[:4], inputs[4].requires_grad_())[1]
    assert torch.autograd.grad(c.sum(), inputs[4])[0].isfinite().all()


@pytest.mark.parametrize("batch, width, blocks", [(2, 16, 1), (3, 11, 2), (3, 64, 6)])
def test_a_warp_for_each_32_units(batch, width, blocks):
    with emulated(Recorder()) as recorder:
        results(sru, draw(4, batch, width), backend="cuda")
    assert [(launched.grid, launched.threads) for launched in recorder.launches] == [((blocks,), 32)] * 2


def test_nothing_past_the_end(emulate):
    emulate()
    compare([guarded(x) for x in draw(9, 3, 11)])


def test_opcheck(emulate):
    emulate()
    product, *others = [x.requires_grad_() for x in draw(4, 2, 8)]
    masks = [torch.rand(2, 4) < 0.3 for _ in range(2)]
    torch.library.opcheck(torch.ops.fw_fairseq.sru.default, (*product.chunk(3, -1), *others, *masks, True))


def sanitized() -> None:
    with emulated(sanitized_launch()):
        compare(draw(9, 2, 20), True, True)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_without_spills(arch):
    for dtype in (torch.float32, torch.bfloat16):
        found = compile_check("sru.cu", cuda_sru.defines(dtype, dtype, True, True, True), arch)
        assert found.keys() == {"sru_forward", "sru_backward"}
        for kernel, used in found.items():
            assert used["spill_stores"] == used["spill_loads"] == used["stack"] == 0, (kernel, used)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda x: (x, {"backend": "cpu"}), "backend is 'cpu'; allowed: auto, torch, cuda"),
        (
            lambda x: ([t.double() for t in x], {"backend": "cuda"}),
            "has kernels for torch.float32, torch.bfloat16, torch.float16, not",
        ),
    ],
)
def test_refused(emulate, change, message):
    emulate()
    inputs, options = change(draw(2, 1, 4))
    with pytest.raises(ValueError, match=message):
        sru(*inputs, **options)
