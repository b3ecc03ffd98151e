"""The launcher for a GPU, with CuPy replaced by what it would be asked; and where kernels are found."""

from __future__ import annotations

import re
import sys
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from hostcuda.hostemu import KERNELS

from fw_fairseq.ops.kernels import compiler, launch
from fw_fairseq.ops.kernels.compiler import CupyLaunch

DEFINES = {"FW_IN": "float", "FW_ROWS": 8}
PARAMS = np.zeros((), np.dtype([("x", "u8"), ("n", "i4")], align=True))[()]


class Kernel:
    def __init__(self, name):
        self.name, self.launches = name, []

    def __call__(self, grid, block, args, **options):
        self.launches.append((grid, block, args, options))


class CuPy:
    """Records the modules that are made; ``error`` is raised where CuPy compiles."""

    __spec__ = object()  # so that it counts as installed

    def __init__(self, error=None):
        self.modules, self.kernels, self.error = [], [], error

    def RawModule(self, **options):
        self.modules.append(options)
        return self

    def get_function(self, name):
        if self.error is not None:
            raise self.error
        self.kernels.append(Kernel(name))
        return self.kernels[-1]


@pytest.fixture
def cupy(monkeypatch):
    fake = CuPy()
    for name in [name for name in sys.modules if name.split(".")[0] in ("cupy", "cupyx")]:
        monkeypatch.delitem(sys.modules, name)  # CuPy leaves a lazy cupyx, which torch.compile would load with what is no CuPy
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 1000 + index, raising=False)
    return fake


def start(launcher, **changes):
    call = dict(source_file="step.cu", kernel_name="step", defines=DEFINES, grid=(2, 3), block=(32, 4), params=PARAMS)
    launcher(**call | dict(shared_bytes=0, device=torch.device("cuda:1")) | changes)


def test_compiles_once_and_launches_on_the_current_stream(cupy):
    launcher = CupyLaunch()
    start(launcher)
    start(launcher)
    assert len(cupy.modules) == len(cupy.kernels) == 1
    options = cupy.modules[0]["options"]
    assert {"-DFW_IN=float", "-DFW_ROWS=8", f"-I{KERNELS}"} <= set(options)
    assert cupy.modules[0]["code"] == (KERNELS / "step.cu").read_text()
    for grid, block, (params,), settings in cupy.kernels[0].launches:
        assert (grid, block) == ((2, 3), (32, 4)) and settings["stream"].ptr == 1001 and settings["shared_mem"] == 0
        assert isinstance(params, np.ndarray) and params.shape == () and params.tobytes() == PARAMS.tobytes()  # by value, says CuPy
        assert params.dtype.fields is None  # CuPy would describe each of them
    start(launcher, defines=DEFINES | {"FW_ROWS": 16})
    assert len(cupy.modules) == 2


def test_a_prepared_kernel_starts_on_the_stream_of_its_device(cupy, monkeypatch):
    """Compiled at once, started with the bytes of a structure, whichever device is the current one."""
    entered, current = [], [1]
    start = CupyLaunch().prepare("step.cu", "step", DEFINES, (2, 3), (32, 4), 0, torch.device("cuda:1"), PARAMS.dtype)
    assert len(cupy.kernels) == 1 and not cupy.kernels[0].launches
    start(PARAMS.tobytes())
    assert not entered

    @contextmanager
    def device(index):
        entered.append(index)
        before, current[0] = current[0], index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    current[0] = 0
    start(PARAMS.tobytes())
    assert entered == [1] and current == [0]
    for _, _, (params,), settings in cupy.kernels[0].launches:
        assert params.tobytes() == PARAMS.tobytes() and settings["stream"].ptr == 1001
    assert len(cupy.kernels) == 1 and len(cupy.kernels[0].launches) == 2


@pytest.mark.parametrize("grid", [(0,), (2, 0), (1, 2, 0)])
def test_nothing_to_do(cupy, grid):
    """CUDA refuses a grid without blocks."""
    start(CupyLaunch(), grid=grid)
    assert not cupy.modules


def test_large_shared_memory_is_asked_for(cupy):
    launcher = CupyLaunch()
    start(launcher, shared_bytes=48 * 1024)
    start(launcher, shared_bytes=48 * 1024 + 16, kernel_name="other")
    assert not hasattr(cupy.kernels[0], "max_dynamic_shared_size_bytes")
    assert cupy.kernels[1].max_dynamic_shared_size_bytes == 48 * 1024 + 16


STEP = "kernel step of cuda/step.cu (FW_IN=float FW_ROWS=8)"


class CompileException(Exception):
    """As CuPy names it."""


def message(**changes) -> list[str]:
    with pytest.raises(RuntimeError) as raised:
        start(CupyLaunch(), **changes)
    return str(raised.value).splitlines()


def test_compile_error(cupy):
    cupy.error = CompileException("step.cu(3): error: one\n\n two\nthree\nfour\nfive")
    assert message() == [f"{STEP} does not compile:", "step.cu(3): error: one", " two", "three", "four"]


def test_a_kernel_that_does_not_load(cupy):
    cupy.error = ValueError("CUDA_ERROR_OUT_OF_MEMORY")
    assert message() == [f"{STEP} cannot be loaded:", "CUDA_ERROR_OUT_OF_MEMORY"]


def test_too_much_shared_memory(cupy, monkeypatch):
    def refuse(self, value):
        raise ValueError("CUDA_ERROR_INVALID_VALUE")

    monkeypatch.setattr(Kernel, "max_dynamic_shared_size_bytes", property(fset=refuse), raising=False)
    assert message(shared_bytes=1 << 20) == [f"{STEP} cannot have 1048576 bytes of shared memory:", "CUDA_ERROR_INVALID_VALUE"]


def test_cupy_that_does_not_import(cupy, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    sentence, reason = message()
    assert sentence == "CuPy, which compiles the kernels, cannot be imported:" and "cupy" in reason


def test_a_changed_header_is_another_kernel(monkeypatch, tmp_path):
    for path in KERNELS.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(compiler, "kernel_folder", lambda: tmp_path)
    before = compiler.compile_options(())
    assert re.fullmatch("-DFW_HEADERS=0x[0-9a-f]{16}", before[-1])  # a number of 64 bits
    (tmp_path / "common.cuh").write_text("// changed")
    assert compiler.compile_options(()) != before


def test_kernels_of_the_installed_package_come_first(monkeypatch, tmp_path):
    package = tmp_path / "fw_fairseq"
    monkeypatch.setattr(compiler, "PACKAGE", package)
    with pytest.raises(RuntimeError, match="install fw_fairseq again"):
        compiler.kernel_folder()
    for folder in (tmp_path / "cuda", package / "cuda"):
        folder.mkdir(parents=True)
        (folder / "common.cuh").touch()
        assert compiler.kernel_folder() == folder


@pytest.fixture
def fresh(cupy):
    """Nothing looked up yet, now and for the tests after."""
    compiler.look_up.cache_clear()
    yield
    compiler.look_up.cache_clear()


@pytest.mark.parametrize(
    "changes, reason",
    [
        (dict(is_available=lambda: False), "backend='cuda' needs a CUDA device, and torch sees none"),
        (dict(get_device_capability=lambda device: (7, 0)), "backend='cuda' needs compute capability 7.5 or higher"),
        ({}, None),
    ],
)
def test_why_not(fresh, monkeypatch, changes, reason):
    usual = dict(is_available=lambda: True, get_device_capability=lambda device: (7, 5))
    for name, value in (usual | changes).items():
        monkeypatch.setattr(torch.cuda, name, value)
    assert CupyLaunch().why_not(torch.device("cuda:0")) == reason


def look_up_on_a_gpu(monkeypatch) -> str | None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return compiler.look_up(torch.device("cuda:0"))


def test_why_not_where_nothing_compiles(fresh, cupy, monkeypatch):
    """ "auto" then runs PyTorch; the kernel that is tried includes the toolkit's headers."""
    cupy.error = CompileException("common.cuh(4): catastrophic error: cannot open source file\n\nmore")
    reason = look_up_on_a_gpu(monkeypatch)
    assert reason.startswith("backend='cuda' has no compiler. CuPy cannot compile kernels: common.cuh(4): catastrophic error")
    assert '#include "common.cuh"' in cupy.modules[0]["code"] and "\n" not in reason


def test_why_not_where_cupy_does_not_import(fresh, monkeypatch):
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert look_up_on_a_gpu(monkeypatch).startswith("backend='cuda' has no compiler. CuPy, which compiles the kernels, cannot be")


def test_why_not_on_rocm(fresh, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert look_up_on_a_gpu(monkeypatch) == "backend='cuda' needs a torch for NVIDIA devices; this one is built for ROCm"


def test_why_not_without_cupy_or_on_the_cpu(fresh, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "these are on cpu" in CupyLaunch().why_not(torch.device("cpu"))
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    assert CupyLaunch().why_not(torch.device("cuda:0")).startswith("backend='cuda' needs CuPy; install fw_fairseq with the extra")


def test_a_form_without_kernels_here_runs_in_pytorch_and_says_so_once(emulate, caplog):
    """Where the kernels could run but for one thing. A device that has none is no news."""
    device, reason = torch.device("cpu"), "this operation has no kernel for integers"
    with caplog.at_level("WARNING"):
        assert not launch.use_kernels("auto", device, lambda: reason) and not caplog.records
        emulate()
        launch.log_once.cache_clear()
        assert launch.use_kernels("auto", device, lambda: None) and not caplog.records
        assert not any(launch.use_kernels("auto", device, lambda: reason) for _ in range(2))
        assert not launch.use_kernels("torch", device, lambda: "another reason")
    assert [record.getMessage() for record in caplog.records] == [f"{reason}; running the PyTorch form instead"]


def test_asked_once_and_inside_a_graph(fresh):
    launcher = CupyLaunch()

    def add(x):
        return x + (1 if launcher.why_not(x.device) else 2)

    assert torch.compile(add, fullgraph=True, backend="eager")(torch.zeros(1)) == 1
    assert add(torch.zeros(1)) == 1 and compiler.look_up.cache_info().misses == 1
