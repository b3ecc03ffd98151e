"""The emulator and the compile check themselves: CUDA's functions under every schedule, and the mistakes that must be caught."""

from __future__ import annotations

from pathlib import Path

import hostcuda
import numpy as np
import pytest
import torch
from hostcuda import SCHEDULES, EmulatorLaunch, HostError, HostModule, guarded, run_sanitized, sanitized_launch
from hostcuda.emulator import BOUNDS
from hostcuda.nvrtc import ARCHITECTURES, compile_check

POLICIES = [*SCHEDULES, ("random", 0), ("random", 1)]
PARAMS = np.dtype([("x", "u8"), ("y", "u8"), ("n", "i4")], align=True)
SOURCE = Path(hostcuda.__file__).with_name("kernels.cu")


@pytest.fixture(scope="module")
def module():
    return HostModule(path=SOURCE)


@pytest.fixture(params=POLICIES, ids=str)
def run(module, request):
    """Runs a kernel under a schedule."""
    policy, seed = request.param

    def call(name, grid, block, *arguments, shared=0):
        module.get_function(name)(grid, block, arguments, shared_mem=shared, policy=policy, seed=seed)

    return call


@pytest.mark.parametrize("width", [32, 16, 8])
def test_shuffles(run, width):
    found = torch.zeros(32, 32, 4, dtype=torch.int32)
    run("shuffles", (1,), (32,), found, np.int32(width))
    for distance in range(32):
        for lane in range(32):
            base, up, across = lane & ~(width - 1), lane - distance, lane ^ distance
            down = lane if lane % width + distance >= width else lane + distance
            across = lane if across > (lane | (width - 1)) else across
            expected = [base | distance % width, lane if up < base else up, down, across]
            assert found[distance, lane].tolist() == expected


def test_votes(run):
    x = torch.randint(0, 9, (32,), dtype=torch.int32)
    found = torch.zeros(5, 32, dtype=torch.int32)
    run("votes", (1,), (32,), x, found)
    values = x.tolist()
    ballot, any_, all_, total, match = ([v & 0xFFFFFFFF for v in row.tolist()] for row in found)
    assert set(ballot) == {sum(1 << i for i in range(32) if values[i])}
    assert set(any_) == {int(any(values))} and set(all_) == {1} and set(total) == {sum(values)}
    assert match == [sum(1 << i for i in range(32) if values[i] == v) for v in values]


def test_barrier_votes(run):
    found = torch.zeros(3, 64, dtype=torch.int32)
    run("barrier_votes", (1,), (64,), found)
    assert [set(row.tolist()) for row in found] == [{22}, {1}, {0}]


def test_threads_that_leave_early(run):
    y = torch.zeros(96)
    run("leave_early", (1,), (8, 12), y, np.int32(70))
    assert torch.equal(y[:70], torch.arange(69, -1, -1.0)) and not y[70:].any()


def test_half_warps(run):
    y = torch.zeros(32)
    run("half_warps", (1,), (32,), y)
    assert y.tolist() == [120.0] * 16 + [376.0] * 16


def test_named_barriers(run):
    """One warp produces, three consume, through a ring of two buffers."""
    x, y = torch.randn(9, 32), torch.zeros(3, 32)
    run("ring", (1,), (128,), x, y, np.int32(9))
    torch.testing.assert_close(y, torch.stack([torch.roll(x.sum(0), -w) for w in (1, 2, 3)]))


def test_atomics(run):
    x, histogram, total = torch.randint(0, 16, (3000,), dtype=torch.int32), torch.zeros(17, dtype=torch.int32), torch.zeros(1)
    run("histogram", (3,), (1024,), x, histogram, total, np.int32(3000))
    assert torch.equal(histogram[:16], torch.bincount(x, minlength=16).int()) and histogram[16] == x.max() and total == 1500
    lock, count = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    run("lock", (2,), (96,), lock, count)
    assert count.item() == 192


@pytest.mark.parametrize("kernel, dtype", [("product_bf16", torch.bfloat16), ("product_f16", torch.float16)])
def test_product_of_16_bit_numbers(run, kernel, dtype):
    """(16,16) by (16,16): cp.async, ldmatrix in all forms, mma."""
    a, b, c = torch.randn(16, 16).to(dtype), torch.randn(16, 16).to(dtype), torch.zeros(16, 16)
    run(kernel, (1,), (32,), a, b, c)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_squares(run):
    """A fragment to shared memory, straight and transposed: the two ways that devices have."""
    x, y = torch.randn(16, 16), torch.zeros(4, 16, 16)
    run("squares", (1,), (32,), x, y)
    x = x.bfloat16().float()
    assert torch.equal(y, torch.stack([x, x.T, x, x.T]))


def test_product_in_tf32(run):
    """Operands rounded to 11 significant bits, ties away from zero, as a Python integer does it."""
    a, b, c = torch.randn(16, 8), torch.randn(8, 8), torch.zeros(16, 8)
    a[0, 0], b[0, 0] = 1 + 2**-11, -1 - 2**-11  # ties

    def rounded(x):
        bits = (x.contiguous().view(torch.int32).long() + 0x1000) & ~0x1FFF
        return bits.int().view(torch.float32)

    run("product_tf32", (1,), (32,), a, b, c)
    assert rounded(a)[0, 0] == 1 + 2**-10
    torch.testing.assert_close(c, rounded(a) @ rounded(b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [(5, 16), (2, 4)])
def test_partial_copies(run, rows):
    """cp.async reads as many bytes as it is told and fills the rest with zeros."""
    read, size = rows
    x, y = torch.arange(1, 17, dtype=torch.uint8), torch.full((16,), 99, dtype=torch.uint8)
    run("partial_copy", (1,), (1,), x, y, np.int32(read), np.int32(size))
    assert y[:size].tolist() == [*range(1, read + 1), *[0] * (size - read)]


def caught(module, name, threads, *arguments, **options) -> str:
    with pytest.raises(HostError) as raised:
        module.get_function(name)((1,), (threads,), arguments, **options)
    return str(raised.value)


def test_mistakes_are_caught(module):
    y = torch.zeros(128)
    assert "divergent __syncthreads" in caught(module, "divergent", 64, y)
    assert "deadlock" in caught(module, "half_shuffle", 32, y)
    assert "not in its mask 0000ffff" in caught(module, "stray_lane", 32, y)
    assert "never waited for" in caught(module, "no_wait", 1, y)
    assert "not aligned to 16 bytes" in caught(module, "ldmatrix_misaligned", 32)
    x, ends = guarded(torch.randn(1024)), guarded(torch.zeros(1024))
    assert "invalid access" in caught(module, "past_the_end", 1024, x, ends)
    module.get_function("unwritten")((1,), (32,), (y,))
    assert y[31].isnan() and not y[:31].isnan().any()


def test_fixed_arrays_are_checked():
    module = HostModule(path=SOURCE, flags=BOUNDS)
    assert "index 32 is out of bounds" in caught(module, "index", 32, torch.zeros(32), np.int32(32))
    assert "misaligned access" in caught(module, "misaligned", 1, torch.zeros(4))


@pytest.mark.parametrize("kernel, missing", [("rotate", "FIRST"), ("rotate", "SECOND"), ("rotate_warp", "WARP"), ("copy", "WAIT")])
def test_schedules_show_a_missing_barrier(kernel, missing):
    """With all barriers every schedule gives the right numbers; without one of them at least one schedule does not."""
    threads = 32 if kernel == "rotate_warp" else 128
    x = torch.randn(threads)
    expected = {"rotate": torch.roll(x, -33 * 8), "rotate_warp": torch.roll(x, 1), "copy": torch.roll(x, -4)}[kernel]

    def right(module, policy, seed):
        y = torch.zeros(threads)
        try:
            module.get_function(kernel)((1,), (threads,), (x, y), policy=policy, seed=seed)
        except HostError:
            return False
        return torch.equal(y, expected)

    assert all(right(HostModule(path=SOURCE), *schedule) for schedule in SCHEDULES)
    assert not all(right(HostModule(path=SOURCE, options=(f"-DWITHOUT_{missing}",)), *schedule) for schedule in SCHEDULES)


def launch_rotate(*missing: str) -> None:
    x, y = torch.randn(128), torch.zeros(128)
    params = np.array((x.data_ptr(), y.data_ptr(), 128), PARAMS)[()]
    sanitized_launch(folder=SOURCE.parent)("kernels.cu", "rotate_params", dict.fromkeys(missing, 1), (1,), (128,), params)
    assert torch.equal(y, torch.roll(x, -33 * 8))


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, change, told", [("thread", "WITHOUT_SECOND", "data race"), ("address", "BEYOND", "heap-buffer-overflow")]
)
def test_sanitizers_see(kind, change, told):
    with pytest.raises(AssertionError, match=told):
        run_sanitized(kind, f"test_hostcuda.launch_rotate({change!r})")


@pytest.mark.parametrize("name, dtype", [("float", torch.float32), ("__half", torch.float16), ("__nv_bfloat16", torch.bfloat16)])
def test_launch(name, dtype):
    """As the project's code launches: file, macros, one structure by value, dynamic shared memory."""
    x, y = torch.randn(32).to(dtype), torch.zeros(32)
    params = np.array((x.data_ptr(), y.data_ptr(), 32), PARAMS)[()]
    launch = EmulatorLaunch(folder=SOURCE.parent, bounds=True)
    launch("kernels.cu", "reverse", {"FW_IN": name}, (1,), (32,), params, 128, torch.device("cpu"))
    assert torch.equal(y, x.float().flip(0)) and launch.calls == [("kernels.cu", "reverse", {"FW_IN": name})]


def test_arguments_of_unclear_size_are_refused(module):
    with pytest.raises(TypeError, match="not int"):
        module.get_function("unwritten")((1,), (32,), (3,))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compile_check(arch):
    """Every wrapper of ptx.cuh that the architecture has."""
    found = compile_check("kernels.cu", {"FW_IN": "__half"}, arch, folder=SOURCE.parent)
    assert found["reverse"]["registers"] > 0 and found["reverse"]["spill_stores"] == 0
    assert found["rotate"]["shared"] == 128 * 4
    assert ("product_bf16" in found) == ("product_tf32" in found) == (arch != "75") and "product_f16" in found


def test_spills_are_reported():
    assert compile_check("kernels.cu", {"SPILL": 1}, "80", folder=SOURCE.parent)["spill"]["spill_stores"] > 0


def test_compile_errors_are_shown():
    with pytest.raises(RuntimeError, match="WRONG_TYPE"):
        compile_check("kernels.cu", {"FW_IN": "WRONG_TYPE"}, "80", folder=SOURCE.parent)
    with pytest.raises(HostError, match="WRONG_TYPE"):
        HostModule(path=SOURCE, options=("-DFW_IN=WRONG_TYPE",))
