"""Products of fp16 on the emulator, against the definition in float64: as accurate as tf32 wherever numbers leave its range."""

from __future__ import annotations

import pytest
import torch
from hostcuda import SCHEDULES, EmulatorLaunch, sanitized_launch
from hostcuda.nvrtc import compile_check, long_ones
from support.cuda_scan import by_definition, by_kernels, compare, draw, launches
from support.draws import assert_same
from support.emulated import emulated

from fw_fairseq.ops.kernels import delta, linear

FP16 = torch.float16


@pytest.mark.parametrize("policy, seed", SCHEDULES)
@pytest.mark.parametrize("family, rule", [(linear, "gated"), (delta, "gated_delta")])
def test_any_schedule(one_thread, family, rule, policy, seed):
    compare(family, rule, (2, 1, 150, 64, 64), FP16, EmulatorLaunch(policy, seed))


# Of the largest entry of fp16, 65504, and of its least normal one, 6e-5: what is multiplied by how much.
@pytest.mark.parametrize("key, value, factors", [
    (64, 64, dict(k=3e3, v=1e3, q=1e-5, dy=1e-3, memory=1e5)),  # a memory beyond the range
    (64, 64, dict(k=3e2, q=1e4, v=1e-4, dy=1e-3, memory=1e-4)),  # pairs beyond it
    (64, 64, dict(v=1e3, w=1e4, q=1e-4, dy=1e-4, dmemory=1e-4)),  # values times a strength beyond it
    (64, 64, dict(dy=1e-2, q=1e-3, k=1e-1, v=1e2, dmemory=1e-9)),  # a gradient of the memory below it
    (300, 20, dict(k=1e3, v=1e3, q=1e-4, dy=1e-3)),  # several warps to a column of the memory
])  # fmt: skip
def test_what_leaves_the_range(one_thread, key, value, factors):
    in_range_again(linear, "gated", (1, 1, 70, key, value), factors)


@pytest.mark.parametrize("rule, key, value, factors", [
    ("gated_delta", 64, 64, dict(v=1e3, q=1e-4, dy=1e-3, memory=1e5)),  # a memory beyond the range
    ("delta", 64, 64, dict(k=3e3, q=3e2, e=1e-7, v=1e-4, dy=1e-3)),  # pairs beyond it
    ("delta", 64, 64, dict(v=1e3, w=1e4, q=1e-4, dy=1e-4, dmemory=1e-4)),  # values times a strength beyond it
    ("gated_delta", 64, 64, dict(dy=1e-2, q=1e-3, k=1e-1, v=1e2, dmemory=1e-9)),  # a gradient of the memory below it
    ("delta", 64, 64, dict(v=1e-3, memory=1e-7, dmemory=1e-7, dy=1e-3, q=1e-2)),  # all below it
    ("gated_delta", 32, 32, dict(dmemory=1e6, memory=1e-7, v=1e-7, dy=1e-6, w=1e-3)),  # an adjoint beyond it, a memory below it
    ("delta", 64, 64, dict(k=1e-2, e=1e4, dmemory=1e3, memory=1e-2)),  # an adjoint times a strength beyond it
    ("gated_delta", 200, 40, dict(v=1e3, q=1e-4, dy=1e-3, memory=1e5)),  # two warps to a column of the memory
    ("delta", 300, 20, dict(v=1e3, q=1e-4, dy=1e-3, memory=1e5, dmemory=1e-3)),  # four
])  # fmt: skip
def test_what_leaves_the_range_with_an_erase(one_thread, rule, key, value, factors):
    in_range_again(delta, rule, (1, 1, 70, key, value), factors)


def in_range_again(family, rule: str, shape, factors: dict[str, float], launch=None) -> None:
    x = draw(rule, shape, FP16)
    x |= {"dy": torch.randn_like(x["v"]), "dmemory": torch.randn_like(x["memory"])}
    for name, factor in factors.items():
        x[name] = (x[name].float() * factor).to(x[name].dtype)
    assert all(part is None or part.isfinite().all() for part in x.values())
    dy, dmemory = x.pop("dy"), x.pop("dmemory")
    launch = launch or EmulatorLaunch("prio", 2)
    actual, expected = by_kernels(family, x, dy, dmemory, "fp16", launch), by_definition(x, dy, dmemory)
    for name, exact in expected.items():
        most = exact.abs().max()
        assert most < 6e4 or actual[name].dtype == torch.float32, (name, most)
        # 2^-25 is half of the distance between fp16's least numbers.
        assert (actual[name].double() - exact).abs().max() < 4e-3 * most + 2**-25, name


def sanitized() -> None:
    with emulated(sanitized_launch()) as launch:
        for key in (16, 160):  # a warp to a column of the memory, and two
            in_range_again(delta, "gated_delta", (1, 1, 37, key, 16), dict(v=1e3, q=1e-4, dy=1e-3, memory=1e5), launch)


def test_numbers_that_are_none_stay_so(one_thread):
    """From the next 16 tokens on at the latest, and not before their own 16."""
    x = draw("gated", (1, 1, 40, 32, 32), FP16)
    x["v"][:, :, 20, 3], x["v"][:, :, 21, 5] = float("nan"), float("inf")
    dy, dmemory = torch.randn_like(x["v"]), torch.randn_like(x["memory"])
    actual = by_kernels(linear, x, dy, dmemory, "fp16", EmulatorLaunch())
    assert actual["y"][..., 20:, 3].isnan().all() and not actual["y"][..., 21:, 5].isfinite().any()
    assert_same({"y": actual["y"][:, :, :16]}, {"y": by_definition(x, dy, dmemory)["y"][:, :, :16]}, 2e-3)


@pytest.mark.cases_in_ci(1)
@pytest.mark.parametrize("arch, width", long_ones([("90", 64), ("80", 64), ("90", 128)]))
@pytest.mark.parametrize("family, rule", [(linear, "gated"), (delta, "gated_delta")])
def test_compiles_without_spills(family, rule, arch, width):
    for launched in launches(family, rule, (1, 1, 17, width, width), FP16, (int(arch[:-1]), 0)):
        found = compile_check(launched.source, launched.defines, arch)[launched.kernel]
        assert max(found["spill_stores"], found["stack"]) == 0, (launched.kernel, found)
