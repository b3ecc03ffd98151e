"""The emulator and the compile check themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hostcuda import EmulatorLaunch, HostError, HostModule
from hostcuda.nvrtc import ARCHITECTURES, compile_check

PARAMS = np.dtype([("x", "u8"), ("y", "u8"), ("n", "i4")], align=True)
REVERSE = r"""
#include "common.cuh"
struct Params { const FW_IN* x; float* y; int n; };
extern "C" __global__ void reverse(const Params p) {
    extern __shared__ float held[];
    int i = threadIdx.x;
    held[i] = to_float(p.x[i]);
    __syncthreads();
    p.y[i] = held[p.n - 1 - i];
}
"""


@pytest.fixture
def folder(tmp_path):
    from hostcuda.emulator import KERNELS

    for header in KERNELS.glob("*.cuh"):
        (tmp_path / header.name).write_bytes(header.read_bytes())
    (tmp_path / "reverse.cu").write_text(REVERSE)
    return tmp_path


@pytest.mark.parametrize("name, dtype", [("float", torch.float32), ("__half", torch.float16), ("__nv_bfloat16", torch.bfloat16)])
def test_launch_on_the_emulator(folder, name, dtype):
    x, y = torch.randn(32).to(dtype), torch.zeros(32)
    params = np.array((x.data_ptr(), y.data_ptr(), 32), PARAMS)[()]
    EmulatorLaunch(folder=folder, bounds=True)("reverse.cu", "reverse", {"FW_IN": name}, (1,), (32,), params, 128, "cpu")
    assert torch.equal(y, x.float().flip(0))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compile_check(folder, arch):
    found = compile_check("reverse.cu", {"FW_IN": "__half"}, arch, folder=folder)["reverse"]
    assert found["registers"] > 0 and found["spill_stores"] == 0


def test_compile_errors_are_shown(folder):
    with pytest.raises(RuntimeError, match="FW_IN"):
        compile_check("reverse.cu", {}, "80", folder=folder)
    with pytest.raises(HostError, match="FW_IN"):
        HostModule(path=folder / "reverse.cu")
