"""Loops in C++ for a CPU. The machine's compiler compiles all sources of this folder on first use, in a few seconds.

The library lies in the user's cache folder, by sources, compiler options and processor. It ends with its check sum, and is loaded
only from a file and a folder that no other user can write to; otherwise it is compiled again. Without a compiler, PyTorch computes
the same. The environment variable FW_FAIRSEQ_COMPILED=0 asks for that, and CXX names another compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import io
import logging
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from ...errors import Mistake
from ...files import write_atomically

logger = logging.getLogger(__name__)
FOLDER = Path(__file__).parent
OPTIONS = "-std=c++17 -O3 -march=native -fno-math-errno -fno-trapping-math -fPIC -pthread".split()  # noqa: SIM905
NAMES = {torch.float32: "float", torch.float64: "double"}
GATHERED_NAMES = NAMES | {torch.bfloat16: "bfloat16"}  # of the loops of gathered.cpp and projections.cpp
POINTERS = {"pool": 11, "pool_gradients": 19, "sru": 10, "memory_step": 1, "source_step": 1, "additive_step": 1, "leap_step": 1}
GATHERED = {"choose": 8, "sum": 6, "few": 6, "project": 1, "feed": 1}
LOADED: list[io.FileIO] = []
SUM = hashlib.sha256().digest_size
SECONDS = 300  # that a compiler may take for one file
MANY = 2**18  # numbers from which on threads share the work


def find_compiler() -> list[str] | None:
    """Returns the command of the compiler, the words of CXX or ``c++``, or None where there is no such program."""
    words = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    program = shutil.which(words[0])
    return None if program is None else [program, *words[1:]]


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the compiled loops, or None where they cannot be had."""
    compiler = find_compiler()
    if os.environ.get("FW_FAIRSEQ_COMPILED") == "0" or compiler is None:
        return None
    try:
        file = build(*compiler)
        found = ctypes.CDLL(opened(file))
        LOADED.append(file)  # open as long as the library, which is never closed, and whose name is the number of this file
    except (OSError, RuntimeError, subprocess.SubprocessError, Mistake) as error:
        logger.info("SRU, pooling and decoding run in PyTorch, because %s cannot compile their loops: %s", compiler[0], error)
        return None
    for name, number in (("float", ctypes.c_float), ("double", ctypes.c_double)):
        for loop, count in POINTERS.items():
            form = getattr(found, f"{loop}_{name}")
            form.argtypes, form.restype = [ctypes.c_void_p] * count + [number, ctypes.c_void_p] * (loop == "sru"), None
    for name in GATHERED_NAMES.values():
        for loop, count in GATHERED.items():
            form = getattr(found, f"{loop}_{name}")
            form.argtypes, form.restype = [ctypes.c_void_p] * count, None
    return found


def loop(name: str, dtype: torch.dtype) -> Callable[..., None]:
    """Returns the loop of this name for numbers of this type. The library must be there."""
    return getattr(library(), f"{name}_{GATHERED_NAMES[dtype]}")


def sources() -> list[Path]:
    """Returns the files that the library is made of, headers included."""
    return sorted(path for path in FOLDER.iterdir() if path.suffix in (".cpp", ".h"))


def build(*compiler: str) -> io.FileIO:
    """Returns the library as an open file. It is compiled unless an earlier process did so."""
    command = [*compiler, *OPTIONS]
    parts = [*(path.read_bytes() for path in sources()), " ".join(command).encode(), processor()]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "fw_fairseq" / f"loops-{hashlib.sha256(bytes(1).join(parts)).hexdigest()[:20]}.so"
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    file = open_whole(path)
    if file is None:
        write_atomically(path, lambda part: compile_sources(command, part))
        file = open_whole(path)
    if file is None:
        raise OSError(f"{path} is not as it was written")
    return file


def open_whole(path: Path) -> io.FileIO | None:
    """Returns the library at ``path`` as an open file, or None where it is missing, is damaged, or other users could write to it. A
    folder of this user is closed to them."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        closed = is_closed(folder, path.parent)
        if not closed:
            os.fchmod(folder, 0o700)
        file = io.FileIO(path, opener=lambda name, flags: os.open(Path(name).name, flags, dir_fd=folder))
    except FileNotFoundError:
        return None
    finally:
        os.close(folder)
    content = file.readall()
    if closed and is_closed(file.fileno(), path) and sha256(content[:-SUM]) == content[-SUM:]:
        return file
    logger.info("%s is damaged, or other users could write to it; it is compiled again", path)
    return None


def is_closed(descriptor: int, path: Path) -> bool:
    """Returns whether only this user and the machine's administrator can write to what is open. It must belong to one of them."""
    found = os.fstat(descriptor)
    if found.st_uid not in (0, os.getuid()):
        raise OSError(f"{path} belongs to another user")
    return not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def opened(file: io.FileIO) -> str:
    """Returns a name that stands for just this open file, whatever lies under its path by now."""
    name = f"/proc/self/fd/{file.fileno()}"
    return name if os.path.exists(name) else str(file.name)


def compile_sources(command: list[str], path: Path) -> None:
    """Writes the library and its check sum to ``path``. All sources are compiled at the same time."""

    def run(*arguments: str) -> None:
        subprocess.run([*command, *arguments], check=True, capture_output=True, timeout=SECONDS)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        objects = {source: f"{folder}/{source.stem}.o" for source in sources() if source.suffix == ".cpp"}
        list(pool.map(lambda source: run("-c", str(source), "-o", objects[source]), objects))
        run("-shared", *objects.values(), "-o", str(path))
    with path.open("r+b") as file:
        file.write(sha256(file.read()))
    path.chmod(path.stat().st_mode & 0o755)


def sha256(content: bytes) -> bytes:
    """The check sum."""
    return hashlib.sha256(content).digest()


def processor() -> bytes:
    """Returns what the library is compiled for: machines that share a home folder may differ in their instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return "".join(os.uname()).encode()
    return b"".join(sorted({line for line in lines if line.startswith((b"flags", b"model name", b"Features", b"CPU part"))}))


def takes(first: Tensor, *others: Tensor) -> bool:
    """Returns whether the compiled loops take these operands: plain tensors in memory, all of one type."""
    plain = all(type(x) is Tensor and x.device.type == "cpu" and x.dtype == first.dtype for x in (first, *others))
    return plain and first.dtype in NAMES and not torch.compiler.is_compiling() and library() is not None


def threads(numbers: int) -> int:
    """Returns how many threads share the work on so many numbers."""
    return torch.get_num_threads() if numbers > MANY else 1


def integers(*values: int) -> ctypes.Array:
    """Returns the values as an array of 64 bits each."""
    return (ctypes.c_int64 * len(values))(*values)
