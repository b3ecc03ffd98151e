"""The project's ``launch`` on the emulator, and tensors that end at an unmapped page."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
from collections.abc import Iterator
from pathlib import Path

import torch

from fw_fairseq.ops.kernels.compiler import Launcher

from .hostemu import KERNELS, HostModule

BOUNDS = ("-fsanitize=bounds,alignment", "-fno-sanitize-recover=all")
SANITIZERS = {
    None: (),
    "thread": ("-fsanitize=thread",),
    "address": ("-fsanitize=address", "--param=asan-stack=0", *BOUNDS),  # the fibers' stacks are not the process's own
}
SCHEDULES = (("fifo", 0), ("reverse", 0), ("prio", 1), ("prio", 2), ("prio", 3))


@functools.cache
def module(path: Path, options: tuple[str, ...], flags: tuple[str, ...]) -> HostModule:
    return HostModule(path=path, options=options, flags=flags)


class EmulatorLaunch(Launcher):
    """launch(source_file, kernel_name, defines, grid, block, params, shared_bytes, device) as in ``ops.kernels``, on the CPU.

    policy, seed: the schedule of the threads (``SCHEDULES`` catch every missing barrier that was tried); bounds: indices of fixed
    arrays and alignment are checked; sanitizer: see ``sanitize.run_sanitized``; truncates: products on tensor cores cut off their
    sums, as devices do, instead of rounding them. ``calls`` lists what was launched.
    """

    device_type = "cpu"
    blocks = 1  # processors of the device that it stands for

    def __init__(
        self,
        policy: str = "fifo",
        seed: int = 0,
        bounds: bool = False,
        sanitizer: str | None = None,
        folder=KERNELS,
        truncates: bool = False,
    ):
        self.schedule, self.folder = {"policy": policy, "seed": seed}, folder
        self.flags = (*(BOUNDS if bounds else SANITIZERS[sanitizer]), *("-DCUHOST_TRUNCATES",) * truncates)
        self.calls: list[tuple[str, str, dict]] = []

    def why_not(self, device: torch.device) -> str | None:
        return None if device.type == "cpu" else f"the emulator takes tensors on the CPU; these are on {device}"

    def capability(self, device: torch.device) -> tuple[int, int]:
        return (9, 0)

    def processors(self, device: torch.device) -> int:
        return self.blocks

    def __call__(self, source_file, kernel_name, defines, grid, block, params, shared_bytes=0, device=None) -> None:
        assert device is None or torch.device(device).type == "cpu", device
        if 0 in grid:
            return
        options = tuple(f"-D{name}={value}" for name, value in defines.items())
        kernel = module(self.folder / source_file, options, self.flags).get_function(kernel_name)
        self.calls.append((source_file, kernel_name, dict(defines)))
        kernel(grid, block, (params,), shared_mem=shared_bytes, **self.schedule)


def guarded(x: torch.Tensor) -> torch.Tensor:
    """A copy that ends right before an unmapped page: any access past its end is caught."""
    x = x.contiguous()
    size = x.numel() * x.element_size()
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    area = mmap.mmap(-1, pages + mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    assert protect(ctypes.c_void_p(start + pages), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    copy = torch.frombuffer(area, dtype=x.dtype, count=x.numel(), offset=pages - size).view(x.shape)
    return copy.copy_(x)


@contextlib.contextmanager
def unwritten_is_nan() -> Iterator[None]:
    """Fills every new tensor with NaN, as shared memory is filled before each block, so that what a kernel leaves out shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
