"""Compiles kernels as CuPy would, for any architecture, without a device."""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from pathlib import Path

import pytest

from .hostemu import CACHE, KERNELS, write_whole

EVERY = ("75", "80", "86", "89", "90", "100", "120")
ARCHITECTURES = EVERY if os.environ.get("FW_ARCHITECTURES") == "all" else ("75", "80", "90")  # of tests that compile for several


def long_ones(cases: list[tuple]) -> list:
    """These cases, which begin with an architecture. Tests of sm_80 are marked as long: sm_90 sees the same faults."""
    return [pytest.param(*case, marks=[pytest.mark.long] * (case[0] == "80")) for case in cases]


def compile_check(source_file, defines=None, arch="80", options=(), folder=KERNELS) -> dict[str, dict[str, int]]:
    """Compiles ``source_file`` and returns {kernel: {registers, shared, stack, spill_stores, spill_loads}}.

    RuntimeError with the compiler's log where it does not compile.
    """
    return compiled(source_file, defines, arch, options, folder)[1]


def compiled(source_file, defines=None, arch="80", options=(), folder=KERNELS) -> tuple[bytes, dict[str, dict[str, int]]]:
    """The machine code of ``source_file``, and what ``compile_check`` returns; from the cache on disk where the same compiler has
    compiled the same text with the same options."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Failed to detect number of GPUs")
        from cupy.cuda import nvrtc
    path = Path(folder) / source_file
    flags = [f"-D{name}={value}" for name, value in (defines or {}).items()] + list(options)
    command = (*cupy_options(folder), *flags, f"-arch=sm_{arch}", "--ptxas-options=-v")
    headers = sorted({*Path(folder).glob("*.cuh"), *KERNELS.glob("*.cuh")})
    content = "".join(x.read_text() for x in (path, *headers)) + repr((command, nvrtc.getVersion()))
    found = CACHE / (hashlib.sha1(content.encode()).hexdigest() + ".json")
    code = found.with_suffix(".cubin")
    if not (found.exists() and code.exists()):
        program = nvrtc.createProgram(path.read_text(), str(path), (), ())
        try:
            nvrtc.compileProgram(program, command)
            write_whole(code, nvrtc.getCUBIN(program) + b"\0")  # CuPy leaves out the last byte
            write_whole(found, json.dumps(resources(nvrtc.getProgramLog(program))).encode())
        except nvrtc.NVRTCError as error:
            raise RuntimeError(f"{source_file} for sm_{arch} with {flags}: {error}\n{nvrtc.getProgramLog(program)}") from None
        finally:
            nvrtc.destroyProgram(program)
    return code.read_bytes(), json.loads(found.read_text())


def cupy_options(folder) -> tuple[str, ...]:
    """What CuPy adds to the options of a RawModule."""
    from cupy._core import core

    own = core.assemble_cupy_compiler_options(("-std=c++17", f"-I{folder}", f"-I{KERNELS}"))
    return (*own, "-ftz=true", "--device-as-default-execution-space")


def resources(log: str) -> dict[str, dict[str, int]]:
    """The figures of ptxas' report, by kernel."""
    found: dict[str, dict[str, int]] = {}
    kernel = None
    for line in log.splitlines():
        if name := re.search(r"(?:entry function|Function properties for) '?([\w$]+)'?", line):
            kernel = found.setdefault(name[1], {"registers": 0, "shared": 0, "stack": 0, "spill_stores": 0, "spill_loads": 0})
        if kernel is None:
            continue
        if m := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            kernel.update(stack=int(m[1]), spill_stores=int(m[2]), spill_loads=int(m[3]))
        if m := re.search(r"Used (\d+) registers", line):
            kernel["registers"] = int(m[1])
        if m := re.search(r"(\d+) bytes smem", line):
            kernel["shared"] = int(m[1])
    return found
