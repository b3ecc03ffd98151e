"""The .cu source that CuPy compiles for a GPU, compiled by g++ and run on the CPU.

    kernel = HostModule(code=source, options=("-DN=4",)).get_function("name")
    kernel((grid_x,), (block_x,), (tensor, np.int32(n)), shared_mem=0)

as with cupy.RawModule. ``cuda_host.h`` has the CUDA side: one block at a time, each thread a fiber that gives way at barriers
and warp operations; ``policy`` and ``seed`` choose the order.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "cuda"
CACHE = Path(os.environ.get("HOSTEMU_CACHE", Path(tempfile.gettempdir()) / f"hostemu-{os.getuid()}"))
POLICIES = {"fifo": 0, "reverse": 1, "random": 2, "prio": 3}
COMPILE = [
    "-std=c++17",
    "-O0",  # tests run a kernel for less time than any optimisation takes
    "-g1",  # lines for the sanitizers
    "-march=x86-64-v3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-fno-gnu-unique",
    "-w",
]
STACKS: list[ctypes.c_void_p] = []
ALIGNMENT = r"(?:__align__\s*\(\w+\)\s*)?"
KERNEL = r'extern\s+"C"\s+__global__\s+(?:void\s+)?(?:__launch_bounds__\s*\([^)]*\)\s*)?(?:void\s+)?(\w+)\s*\('


class HostError(RuntimeError):
    """The kernel does not compile, or the emulator caught it doing what it must not do."""


def cuda_includes() -> list[str]:
    """Where NVIDIA's headers for half and bfloat16 are: the wheels' folder, and CuPy's for the <nv/target> that they include."""
    from cuda.pathfinder import find_nvidia_header_directory

    cupy = Path(importlib.util.find_spec("cupy").origin).parent
    folders = [find_nvidia_header_directory("cudart"), str(cupy / "_core/include/cupy/_cccl/libcudacxx")]
    return [flag for folder in folders for flag in ("-isystem", folder)]


def translate(source: str) -> str:
    """Registers every __shared__ variable with the emulator. One variable per declaration."""
    dynamic = rf"extern\s+__shared__\s+{ALIGNMENT}([\w:<> ]+?)\s+(\w+)\s*\[\s*\]\s*;"
    source = re.sub(dynamic, r"\1* \2 = CUHOST_DYNAMIC(\1);", source)
    fixed = rf"(?<!extern )(__shared__\s+{ALIGNMENT}[\w:<>, ]+?\s+(\w+)\s*((?:\[[^\];]*\]\s*)*);)"
    return re.sub(fixed, r"\1 CUHOST_SHARED(\2);", source)


class HostModule:
    """One compiled source. ``flags`` go to g++."""

    def __init__(self, code=None, path=None, options=(), name_expressions=(), flags=()):
        code = Path(path).read_text() if code is None else code
        folder = KERNELS if path is None else Path(path).parent
        self.names = [*name_expressions, *re.findall(KERNEL, code)]
        launchers = "".join(f"CUHOST_KERNEL({i}, {name})\n" for i, name in enumerate(self.names))
        source = f'#line 1 "{path or "kernel.cu"}"\n{translate(code)}\n{launchers}'
        command = ["g++", *COMPILE, *cuda_includes(), *flags]
        command += ["-x", "c++", "-shared", "-include", str(precompiled(tuple(command))), f"-I{folder}", f"-I{KERNELS}"]
        command += [o for o in options if o[:2] in ("-D", "-I")]
        self.lib = ctypes.CDLL(str(build(source, command, folder)))
        self.lib.cuhost_error.restype = ctypes.c_char_p
        self.lib.cuhost_use_stacks(stacks(self.lib))

    def get_function(self, name: str) -> HostKernel:
        return HostKernel(self, name)


def stacks(lib: ctypes.CDLL) -> ctypes.c_void_p:
    """The fibers' stacks, one area for all modules of the process: its guard pages count against the limit of mappings."""
    if not STACKS:
        lib.cuhost_make_stacks.restype = ctypes.c_void_p
        STACKS.append(ctypes.c_void_p(lib.cuhost_make_stacks()))
    return STACKS[0]


@functools.cache
def precompiled(command: tuple[str, ...]) -> Path:
    """cuda_host.h with all that it includes, compiled once per command: most of the time that a kernel takes."""
    own = HERE / "cuda_host.h"
    content = "".join(h.read_text() for h in sorted(HERE.glob("*.h"))) + repr(command)
    header = CACHE / hashlib.sha1(content.encode()).hexdigest() / own.name
    if not header.with_suffix(".h.gch").exists():
        header.parent.mkdir(exist_ok=True, parents=True)
        header.write_text(f'#include "{own}"\n')
        compile_to(header.with_suffix(".h.gch"), [*command, "-x", "c++-header", str(header)])
    return header


def build(source: str, command: list[str], folder: Path) -> Path:
    """The shared library, built once per source, headers and command."""
    headers = sorted({*HERE.glob("*.h"), *folder.glob("*.cuh"), *KERNELS.glob("*.cuh")})
    content = source + "".join(h.read_text() for h in headers) + repr(command)
    library = CACHE / (hashlib.sha1(content.encode()).hexdigest() + ".so")
    if not library.exists():
        CACHE.mkdir(exist_ok=True, parents=True)
        translated = library.with_suffix(f".{os.getpid()}.cpp")
        translated.write_text(source)
        try:
            compile_to(library, [*command, str(translated)])
        finally:
            translated.unlink()
    return library


def write_whole(target: Path, content: bytes) -> None:
    """Whole or not at all, also where two processes want the same."""
    target.parent.mkdir(exist_ok=True, parents=True)
    unfinished = target.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(content)
    unfinished.replace(target)


def compile_to(target: Path, command: list[str]) -> None:
    """Whole or not at all, also where two processes want the same."""
    unfinished = target.with_suffix(f".{os.getpid()}")
    done = subprocess.run([*command, "-o", str(unfinished)], capture_output=True, text=True)
    if done.returncode:
        raise HostError(done.stderr[:4000])
    unfinished.replace(target)


class HostKernel:
    def __init__(self, module: HostModule, name: str):
        self.module, self.name = module, name
        self.launch = getattr(module.lib, f"cuhost_launch_{module.names.index(name)}")
        three = ctypes.POINTER(ctypes.c_uint)
        self.launch.argtypes = [three, three, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_ulonglong]

    def __call__(self, grid, block, args, shared_mem=0, policy="fifo", seed=0):
        kept = [as_argument(a) for a in args]
        pointers = (ctypes.c_void_p * len(kept))(*(ctypes.addressof(k) for k in kept))
        if self.launch(three(grid), three(block), shared_mem, pointers, POLICIES[policy], seed):
            raise HostError(f"{self.name}: {self.module.lib.cuhost_error().decode()}")


def three(size):
    return (ctypes.c_uint * 3)(*(*size, 1, 1, 1)[:3])


def as_argument(a):
    """A kernel argument in memory: the pointer of a tensor or array, the bytes of a numpy scalar or structure."""
    if hasattr(a, "data_ptr"):
        assert a.device.type == "cpu"
        return ctypes.c_void_p(a.data_ptr())
    if isinstance(a, np.ndarray) and a.size > 1:
        return ctypes.c_void_p(a.ctypes.data)
    if isinstance(a, (np.generic, np.ndarray)):
        return ctypes.create_string_buffer(a.tobytes(), a.nbytes)
    raise TypeError(f"pass np.int32, np.float32, ..., not {type(a).__name__}: CuPy would guess its size")
