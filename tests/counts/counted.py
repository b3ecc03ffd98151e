"""The figures of a kernel: what grows with the tokens, counted on the paths of its warps for two lengths."""

from __future__ import annotations

import collections
import math
from typing import NamedTuple

from hostcuda import Launch
from hostcuda.nvrtc import compiled

from .cases import PASSES, Case, record
from .lane import Lane, NotFollowed
from .machine_code import disassemble
from .model import DRAM, Multiprocessor, blocking_loads, milliseconds

Shape = tuple[int, int, int]  # sequences, heads, tokens of each
SHAPES: tuple[Shape, ...] = ((8, 8, 2048), (32, 16, 4096))
TOKENS = (128, 256)  # whole chunks and parts of every kernel
PER = 64  # figures are for so many tokens
REGISTERS = 65536  # of a multiprocessor
INSTRUCTION = 16  # bytes


class Device(NamedTuple):
    """Where parameters begin in the constants, and what a multiprocessor has."""

    params_at: int
    shared: int  # KiB
    threads: int
    blocks: int

    def fits(self, threads: int, registers: int, shared: int) -> int:
        """Blocks that run at once on a multiprocessor."""
        warps = REGISTERS // 4 // (-(-registers // 8) * 256) * 4  # of four parts of the registers
        by_shared = self.shared * 1024 // (-(-shared // 128) * 128 + 1024)
        return min(self.blocks, self.threads // threads, warps // (threads // 32), by_shared)


DEVICES = {
    "80": Device(0x160, 164, 2048, 32),
    "86": Device(0x160, 100, 1536, 16),
    "89": Device(0x160, 100, 1536, 24),
    "90": Device(0x210, 228, 2048, 32),
}


class Paths(NamedTuple):
    """Of the warps of one block: instructions by kind, loads that block a mean warp, its guesses, and cycles of one block by itself
    and of as many as fit."""

    kinds: collections.Counter
    blocking: float
    guesses: float
    times: dict[int, int]  # how often each instruction runs
    alone: int
    full: int


class Figures(NamedTuple):
    """Of one kernel, for ``PER`` tokens of a sequence and head."""

    kernel: str
    registers: int
    spilled: int  # bytes
    fits: int  # blocks on a multiprocessor
    kinds: dict[str, int]  # instructions of all warps
    blocking: float
    guesses: float
    code: int  # bytes of machine code that run again and again
    ms: tuple[float, ...]  # modelled, for each shape

    @property
    def instructions(self) -> int:
        return sum(self.kinds.values())


class Pass(NamedTuple):
    """Of one pass: its kernels, and for each shape the milliseconds in which memory moves what must be moved."""

    kernels: list[Figures]
    least: tuple[float, ...]

    def modelled(self, n: int) -> float:
        """Milliseconds of all kernels for shape n."""
        return sum(kernel.ms[n] for kernel in self.kernels)


def follow(launch: Launch, cubin: bytes, device: Device, fits: int) -> Paths:
    code, labels = disassemble(cubin, launch.kernel)
    lane = Lane(code, labels, launch.threads, launch.grid, launch.params, device.params_at)
    paths = [lane.run(32 * n) for n in range(launch.threads // 32)]
    times = collections.Counter(max(step, ~step) for path in paths for step in path.steps)
    kinds = collections.Counter()
    for step, n in times.items():
        kinds[code[step].kind] += n
    alone = Multiprocessor(code, paths, 1).cycles()
    full = alone if fits == 1 else Multiprocessor(code, paths, fits).cycles()
    blocking = sum(blocking_loads(code, path.steps) for path in paths) / len(paths)
    return Paths(kinds, blocking, lane.guesses.total() / len(paths), dict(times), alone, full)


def figures(launches: tuple[Launch, Launch], architecture: str, shapes=SHAPES, lengths=TOKENS) -> Figures:
    """Of a kernel that was launched for the two lengths. Its blocks are tiles of V, or each has a share of the
    tokens; all blocks together are what one sequence and head takes."""
    launch, device = launches[0], DEVICES[architecture]
    cubin, found = compiled(launch.source, launch.defines, architecture)
    limits = found[launch.kernel]
    fits = device.fits(launch.threads, limits["registers"], launch.shared + limits["shared"])
    few, many = (follow(each, cubin, device, fits) for each in launches)
    blocks = [math.prod(each.grid) for each in launches]
    scale = PER / (lengths[1] - lengths[0])

    def growth(before: float, after: float) -> float:
        return scale * (blocks[1] * after - blocks[0] * before)

    per_block = scale / blocks[1] if blocks[0] == blocks[1] else scale
    return Figures(
        launch.kernel,
        limits["registers"],
        limits["spill_stores"],
        fits,
        {kind: round(growth(few.kinds[kind], n)) for kind, n in many.kinds.items() if growth(few.kinds[kind], n)},
        per_block * (blocks[1] * many.blocking - blocks[0] * few.blocking),
        per_block * (blocks[1] * many.guesses - blocks[0] * few.guesses),
        INSTRUCTION * sum(blocks[1] * n > blocks[0] * few.times.get(step, 0) for step, n in many.times.items()),
        tuple(extended(shape, lengths, fits, blocks, few, many) for shape in shapes),
    )


def extended(shape: Shape, lengths: tuple[int, int], fits: int, blocks: list[int], few: Paths, many: Paths) -> float:
    """Milliseconds for longer sequences: what two lengths show goes on as a straight line."""
    batch, heads, tokens = shape
    further = (tokens - lengths[1]) / (lengths[1] - lengths[0])
    pairs = (tuple(blocks), (few.alone, many.alone), (few.full, many.full))
    count, alone, full = (after + (after - before) * further for before, after in pairs)
    return milliseconds(count * batch * heads, fits, alone, full)


def least(moved: tuple[int, int], shapes=SHAPES, lengths=TOKENS) -> tuple[float, ...]:
    """Milliseconds for each shape in which memory moves the bytes that are given for one sequence and head of the two lengths."""
    for_one = (moved[1] - moved[0]) / (lengths[1] - lengths[0])
    return tuple(batch * heads * (moved[1] + for_one * (tokens - lengths[1])) / DRAM * 1e3 for batch, heads, tokens in shapes)


def count(case: Case, architecture: str, shapes=SHAPES) -> dict[str, Pass]:
    lengths = tuple(tokens * (1 if case.processors == 1 else 4 * case.processors) for tokens in TOKENS)  # all parts of a sequence
    few, many = (record(case, tokens, architecture) for tokens in lengths)
    passes = {}
    for name in PASSES:
        if len(few.launches[name]) != len(many.launches[name]):
            raise NotFollowed(f"{lengths[1]} tokens take other launches than {lengths[0]}")
        pairs = zip(few.launches[name], many.launches[name])
        kernels = [figures(pair, architecture, shapes, lengths) for pair in pairs]
        passes[name] = Pass(kernels, least((few.moved[name], many.moved[name]), shapes, lengths))
    return passes
