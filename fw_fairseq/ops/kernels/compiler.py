"""Compiles and starts the kernels in ``cuda/``: CuPy compiles on first use, torch owns the memory, the stream and the device.

A launcher is called as ``launch(source_file, kernel_name, defines, grid, block, params, shared_bytes, device)``: the file in
``cuda/``, the kernel in it, its macros, the sizes as tuples, ONE structure passed by value (a numpy structured scalar whose dtype
has ``align=True``), bytes of dynamic shared memory. ``prepare`` takes the same but the structure, of which it takes the dtype, and
returns what starts the kernel for a structure's bytes. Nothing is allocated on the device and nothing waits, so a launch can be
captured in a CUDA graph once its kernel has been compiled.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

PACKAGE = Path(__file__).parents[2]
WITHOUT_ASKING = 48 * 1024  # bytes of dynamic shared memory that a kernel gets without asking
COMPILER_ERRORS = ("CompileException", "NVRTCError")  # CuPy's
Defines = tuple[tuple[str, Any], ...]  # macros and their values
PROBE = '#include "common.cuh"\nextern "C" __global__ void probe() {}'
OLDEST = (7, 5)  # what the compiler of CUDA 13 still compiles for


class Launcher:
    """What starts kernels, on tensors of one type of device."""

    device_type: str

    def why_not(self, device: torch.device) -> str | None:
        """A sentence that says why kernels cannot run on ``device``; None where they can."""
        raise NotImplementedError

    def capability(self, device: torch.device) -> tuple[int, int]:
        raise NotImplementedError

    def processors(self, device: torch.device) -> int:
        """The number of multiprocessors, each of which can run a block of its own."""
        raise NotImplementedError

    def __call__(
        self,
        source_file: str,
        kernel_name: str,
        defines: dict[str, Any],
        grid: tuple[int, ...],
        block: tuple[int, ...],
        params: np.ndarray,
        shared_bytes: int,
        device: torch.device,
    ) -> None:
        """Starts a kernel once. A launcher defines this or ``prepare``, by which each does the other's work."""
        self.prepare(source_file, kernel_name, defines, grid, block, shared_bytes, device, params.dtype)(params.tobytes())

    def prepare(
        self,
        source_file: str,
        kernel_name: str,
        defines: dict[str, Any],
        grid: tuple[int, ...],
        block: tuple[int, ...],
        shared_bytes: int,
        device: torch.device,
        structure: np.dtype,
    ) -> Callable[[bytes], None]:
        """Returns what starts the kernel with parameters of this structure, packed."""

        def start(packed: bytes) -> None:
            params = np.ndarray((), structure, packed)
            self(source_file, kernel_name, defines, grid, block, params, shared_bytes, device)

        return start


class CupyLaunch(Launcher):
    """The launcher on a GPU. One compiled kernel per (file, macros, device), on disk too, by CuPy."""

    device_type = "cuda"

    def __init__(self) -> None:
        self.modules: dict[tuple, Any] = {}
        self.kernels: dict[tuple, Any] = {}

    def why_not(self, device: torch.device) -> str | None:
        return missing(device)

    def capability(self, device: torch.device) -> tuple[int, int]:
        return torch.cuda.get_device_capability(device)

    def processors(self, device: torch.device) -> int:
        return torch.cuda.get_device_properties(device).multi_processor_count

    def prepare(
        self,
        source_file: str,
        kernel_name: str,
        defines: dict[str, Any],
        grid: tuple[int, ...],
        block: tuple[int, ...],
        shared_bytes: int,
        device: torch.device,
        structure: np.dtype,
    ) -> Callable[[bytes], None]:
        if 0 in grid:  # an empty batch, which CUDA refuses
            return lambda packed: None
        with torch.cuda.device(device):
            index = torch.cuda.current_device()
            key = (source_file, kernel_name, tuple(defines.items()), index)
            kernel = self.kernels.get(key)
            if kernel is None:
                kernel = self.kernels[key] = self.compile(source_file, kernel_name, key[2], index, shared_bytes)
        plain = np.dtype((np.void, structure.itemsize))  # CuPy would describe each field, in 0.2 ms

        def start(packed: bytes) -> None:
            if torch._C._cuda_getDevice() != index:
                with torch.cuda.device(index):
                    return start(packed)
            stream = SimpleNamespace(ptr=torch._C._cuda_getCurrentRawStream(index))  # all that CuPy reads of a stream
            params = np.ndarray((), plain, bytearray(packed))
            kernel(grid, block, (params,), shared_mem=shared_bytes, stream=stream)

        return start

    def compile(self, source_file: str, kernel_name: str, defines: Defines, index: int, shared_bytes: int) -> Any:
        with one_error("CuPy, which compiles the kernels, cannot be imported"):
            import cupy
        module = self.modules.get((source_file, defines, index))
        if module is None:
            module = cupy.RawModule(code=(kernel_folder() / source_file).read_text(), options=compile_options(defines))
            self.modules[source_file, defines, index] = module
        macros = " ".join(f"{name}={value}" for name, value in defines)
        described = f"kernel {kernel_name} of cuda/{source_file} ({macros})"
        with one_error(f"{described} does not compile", f"{described} cannot be loaded"):
            kernel = module.get_function(kernel_name)
        if shared_bytes > WITHOUT_ASKING:
            with one_error(f"{described} cannot have {shared_bytes} bytes of shared memory"):
                kernel.max_dynamic_shared_size_bytes = shared_bytes
        return kernel


def missing(device: torch.device) -> str | None:
    """A sentence that says what this process lacks to run kernels on ``device``; None where it lacks nothing."""
    return look_up(device)


# torch.compiler.assume_constant_result, which would import the compiler first, and with it triton; else a graph breaks there.
missing.__dict__["_dynamo_marked_constant"] = True


@functools.cache  # decoding asks for every token
def look_up(device: torch.device) -> str | None:
    """As ``missing``."""
    if torch.version.hip is not None:
        return "backend='cuda' needs a torch for NVIDIA devices; this one is built for ROCm"
    if not torch.cuda.is_available():
        return "backend='cuda' needs a CUDA device, and torch sees none"
    if device.type != "cuda":
        return f"backend='cuda' needs tensors on a CUDA device; these are on {device}"
    if importlib.util.find_spec("cupy") is None:
        return "backend='cuda' needs CuPy; install fw_fairseq with the extra [cuda13] or [cuda12]"
    if torch.cuda.get_device_capability(device) < OLDEST:
        return f"backend='cuda' needs compute capability {OLDEST[0]}.{OLDEST[1]} or higher"
    return why_no_compiler(device)


def why_no_compiler(device: torch.device) -> str | None:
    """A sentence that says why CuPy cannot compile and load a kernel without contents; None where it can."""
    try:
        with torch.cuda.device(device):
            with one_error("CuPy, which compiles the kernels, cannot be imported"):
                import cupy
            with one_error("CuPy cannot compile kernels", "CuPy cannot load kernels"):
                cupy.RawModule(code=PROBE, options=compile_options(())).get_function("probe")
    except RuntimeError as error:
        return f"backend='cuda' has no compiler. {' '.join(str(error).split())}"
    return None


@contextlib.contextmanager
def one_error(what: str, otherwise: str | None = None) -> Iterator[None]:
    """Raises any error of CuPy as a RuntimeError: ``what``, or ``otherwise`` where it is given and the compiler is not to blame,
    and the first lines of the error."""
    try:
        yield
    except Exception as error:
        what = what if otherwise is None or type(error).__name__ in COMPILER_ERRORS else otherwise
        lines = [line for line in str(error).splitlines() if line.strip("= ")]
        told = "\n".join(["", *lines[:4]]) if lines else f" {type(error).__name__}"
        raise RuntimeError(f"{what}:{told}") from error


def kernel_folder() -> Path:
    """``fw_fairseq/cuda`` where the package is installed, ``cuda/`` beside it in a checkout."""
    folders = (PACKAGE / "cuda", PACKAGE.parent / "cuda")
    for folder in folders:
        if (folder / "common.cuh").is_file():
            return folder
    raise RuntimeError(f"the CUDA kernels are in none of {', '.join(map(str, folders))}; install fw_fairseq again")


def compile_options(defines: Defines) -> tuple[str, ...]:
    """The compiler's options, with a fingerprint of the headers, which CuPy's cache on disk does not look at."""
    folder = kernel_folder()
    headers = b"".join(path.read_bytes() for path in sorted(folder.glob("*.cuh")))
    fingerprint = hashlib.sha256(headers).hexdigest()[:16]
    return ("-std=c++17", f"-I{folder}", f"-DFW_HEADERS=0x{fingerprint}", *(f"-D{name}={value}" for name, value in defines))
