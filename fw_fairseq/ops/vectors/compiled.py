"""The scans on a CPU as a compiled loop, ``scans.cpp``. The machine's C++ compiler compiles it on first use, in a second or two.

The library lies in the user's cache folder, by source, compiler options and processor. Without a compiler, PyTorch computes the
same in blocks. The environment variable FW_FAIRSEQ_COMPILED=0 asks for that, and CXX names another compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from ... import Mistake
from ...files import write_atomically

logger = logging.getLogger(__name__)
SOURCE = Path(__file__).with_name("scans.cpp")
OPTIONS = "-std=c++17 -O3 -march=native -fno-math-errno -fno-trapping-math -shared -fPIC -pthread".split()  # noqa: SIM905
NAMES = {torch.float32: "float", torch.float64: "double"}
SECONDS = 120  # that a compiler may take
MANY = 2**18  # numbers from which on threads share the work


@functools.cache
def library() -> ctypes.CDLL | None:
    """Returns the compiled scans, or None where they cannot be had."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if os.environ.get("FW_FAIRSEQ_COMPILED") == "0" or compiler is None:
        return None
    try:
        found = ctypes.CDLL(str(build(compiler)))
    except (OSError, RuntimeError, subprocess.SubprocessError, Mistake) as error:
        logger.info("the scans of SRU and pooling run in PyTorch, because %s cannot compile them: %s", compiler, error)
        return None
    for name, number in (("float", ctypes.c_float), ("double", ctypes.c_double)):
        pointers = {"pool": 11, "pool_gradients": 19, "sru": 10}
        for scan, count in pointers.items():
            form = getattr(found, f"{scan}_{name}")
            form.argtypes, form.restype = [ctypes.c_void_p] * count + [number, ctypes.c_void_p] * (scan == "sru"), None
    return found


def build(compiler: str) -> Path:
    """Returns the library, which is compiled unless an earlier process did so."""
    key = hashlib.sha256(b"\0".join([SOURCE.read_bytes(), " ".join([compiler, *OPTIONS]).encode(), processor()])).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "fw_fairseq" / f"scans-{key[:20]}.so"
    if not path.exists():
        command = [compiler, *OPTIONS, str(SOURCE), "-o"]
        write_atomically(path, lambda part: subprocess.run([*command, part], check=True, capture_output=True, timeout=SECONDS))
    if path.stat().st_uid not in (0, os.getuid()):
        raise OSError(f"{path} belongs to another user")
    return path


def processor() -> bytes:
    """Returns what the library is compiled for: machines that share a home folder may differ in their instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return "".join(os.uname()).encode()
    return b"".join(sorted({line for line in lines if line.startswith((b"flags", b"model name", b"Features", b"CPU part"))}))


def takes(*tensors: Tensor) -> bool:
    """Returns whether the compiled scans take these operands: plain tensors in memory, all of one type."""
    plain = all(type(x) is Tensor and x.device.type == "cpu" and x.dtype == tensors[0].dtype for x in tensors)
    return plain and tensors[0].dtype in NAMES and not torch.compiler.is_compiling() and library() is not None


def threads(numbers: int) -> int:
    return torch.get_num_threads() if numbers > MANY else 1


def integers(*values: int) -> ctypes.Array:
    return (ctypes.c_int64 * len(values))(*values)


def pool(a: Tensor, x: Tensor, window: int, texts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the aggregate of the tokens that each one sees, as ``aggregates.aggregate``."""
    logs, means = torch.empty_like(a, memory_format=torch.contiguous_format), by_time(x)
    over_windows("pool", (a, dense(x), logs, means), texts, window, 1)
    return logs, means


def pool_gradients(a, x, logs, means, dlogs, dmeans, window: int, texts: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns the gradients of a and x. Time is reversed: they are sums over the tokens that see each one."""
    da, dx = torch.empty_like(a, memory_format=torch.contiguous_format), by_time(x)
    over_windows("pool_gradients", (logs, dense(dmeans), dense(means), dlogs, a, dense(x), da, dx), texts, window, -1)
    return da, dx


def by_time(x: Tensor) -> Tensor:
    """Returns an empty (B,H,T,V) tensor that lies in memory as (T,B,H,V), which the layer reads next."""
    batch, heads, total, width = x.shape
    return x.new_empty(total, batch, heads, width).permute(1, 2, 0, 3)


def dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def over_windows(scan: str, parts: tuple[Tensor, ...], texts: Tensor | None, window: int, direction: int) -> None:
    """Calls a scan with tensors (B,H,T,...) and the texts (B,H,T), which are equal for all heads. direction: of time, 1 or -1."""
    (batch, heads, total, width), numbers = parts[1].shape, parts[1].numel()
    arguments: list[object] = []
    for part in parts:
        first = part.data_ptr() + (total - 1) * part.stride(2) * part.element_size() * (direction < 0)
        arguments += [first, integers(*part.stride()[:2], direction * part.stride(2))]
    if texts is None:
        arguments += [0, integers(0, 0)]
    else:
        first = texts.data_ptr() + (total - 1) * texts.stride(2) * texts.element_size() * (direction < 0)
        arguments += [first, integers(texts.stride(0), direction * texts.stride(2))]
    call = getattr(library(), f"{scan}_{NAMES[parts[0].dtype]}")
    call(*arguments, integers(batch, heads, total, width, window, threads(numbers)))


def sru(product, x, v_forget, v_reset, c0, padded, keep, scale: float, gradients: bool):
    """Returns h (T,B,D), c, f and r. With ``gradients``, c is (T+1,B,D), with c0 first, and f and r (T,B,D); else c is the last one
    (B,D), and f and r are None. padded, keep: (T,B,1) or None."""
    total, batch, width = x.shape
    product, x, v_forget, v_reset = (part.contiguous() for part in (product, x, v_forget, v_reset))
    h, (f, r) = torch.empty_like(x), [torch.empty_like(x) if gradients else None for _ in range(2)]
    c = x.new_empty(total + 1, batch, width) if gradients else c0.clone(memory_format=torch.contiguous_format)
    if gradients:
        c[0] = c0
    masks = [None if part is None else part.contiguous() for part in (padded, keep)]
    pointers = [0 if part is None else part.data_ptr() for part in (product, x, v_forget, v_reset, *masks, c, h, f, r)]
    getattr(library(), f"sru_{NAMES[x.dtype]}")(*pointers, scale, integers(total, batch, width, threads(product.numel())))
    return h, c, f, r
