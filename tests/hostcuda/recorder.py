"""What would be launched on a device, without running or compiling it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from fw_fairseq.ops.kernels.compiler import Launcher


class Launch(NamedTuple):
    source: str
    kernel: str
    defines: dict[str, object]
    grid: tuple[int, ...]
    threads: int
    shared: int  # bytes, dynamic
    params: bytes


class Recorder(Launcher):
    """A launcher for tensors on the CPU that keeps its launches, for a device of this compute capability with so many processors:
    one sequence fills one processor, so that none is cut into parts.
    """

    device_type = "cpu"

    def __init__(self, capability: tuple[int, int] = (9, 0), processors: int = 1):
        self.of_device, self.blocks = capability, processors
        self.launches: list[Launch] = []

    def why_not(self, device: torch.device) -> None:
        return None

    def capability(self, device: torch.device) -> tuple[int, int]:
        return self.of_device

    def processors(self, device: torch.device) -> int:
        return self.blocks

    def prepare(self, source_file, kernel_name, defines, grid, block, shared_bytes, device, structure):
        sizes = tuple(map(int, grid)), math.prod(block), int(shared_bytes)
        return lambda packed: self.launches.append(Launch(source_file, kernel_name, dict(defines), *sizes, packed))

    def taken(self) -> list[Launch]:
        """The launches so far; from now on it has none."""
        launches, self.launches = self.launches, []
        return launches
