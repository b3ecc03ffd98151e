"""A model of the time that warps take for their paths on one multiprocessor of an H100.

An instruction runs when the pause after the one before it is over, the scoreboards that it waits for are free, its scheduler has no
other warp's instruction in this cycle, and its unit is free. Pauses and scoreboards are the compiler's. The latencies are assumed.
Bank conflicts, misses of the instruction caches, and memory under load are not modelled.
"""

from __future__ import annotations

import collections
import heapq
import itertools
import math

from .lane import Path
from .machine_code import Instruction

PROCESSORS, CLOCK, DRAM = 132, 1.755e9, 3.35e12  # an H100: multiprocessors, cycles and bytes in a second
SCHEDULERS, SCOREBOARDS = 4, 6
OTHERS = 20  # cycles until a result is there, for kinds that LATENCY does not name
LATENCY = {"LDG": 550, "LDS": 30, "LDSM": 33, "LDC": 40, "LOCAL": 40, "STS": 20, "STG": 30, "LDGSTS": 30}
LATENCY |= {"MMA": 34, "MUFU": 24, "SHFL": 26, "CVT": 12, "BAR": 30}
L1, READ = 40, 12  # cycles for what the L1 cache has, and until operands have been read
BLOCKING = 8  # a load blocks if something waits for it within so many instructions


class Warp:
    """Where a warp is on its path, and what it has begun."""

    def __init__(self, path: Path, index: int, block: int):
        self.path, self.index, self.block, self.at = path, index, block, 0
        self.boards = [0] * SCOREBOARDS  # the cycle from which each is free
        self.copied, self.groups = 0, []  # when asynchronous copies are there: all so far, and each group


class Multiprocessor:
    """Runs the paths of the warps of a block, ``blocks`` times beside each other."""

    def __init__(self, code: list[Instruction], paths: list[Path], blocks: int):
        self.code, self.size = code, len(paths)
        self.warps = [Warp(path, n, block) for block, (n, path) in itertools.product(range(blocks), enumerate(paths))]
        self.issued = [0] * SCHEDULERS
        self.free = collections.Counter()  # the cycle from which a unit is free
        self.waiting = collections.defaultdict(list)  # at a barrier: (cycle, warp), None for one that does not wait
        self.loaded = {}  # when 32 bytes of device memory arrive
        self.queue = [(0, n) for n in range(len(self.warps))]

    def cycles(self) -> int:
        """Until the last warp has ended."""
        end = 0
        while self.queue:
            now, n = heapq.heappop(self.queue)
            warp, scheduler = self.warps[n], n % SCHEDULERS
            step = warp.path.steps[warp.at]
            on, i = step >= 0, self.code[max(step, ~step)]
            unit = i.unit if i.unit == "memory" else (i.unit, scheduler)
            ready = max(now, self.issued[scheduler], *(warp.boards[b] for b in i.waits))
            ready = max(ready, self.free[unit]) if i.busy and on else ready
            if ready > now and self.queue and self.queue[0][0] < ready:  # others go first
                heapq.heappush(self.queue, (ready, n))
                continue
            self.issued[scheduler] = ready + 1
            if on:
                self.begin(warp, i, ready, unit)
            warp.at += 1
            until = self.pause(warp, n, i, on, ready)
            if until is not None:
                end = max(end, until)
                if warp.at < len(warp.path.steps):
                    heapq.heappush(self.queue, (until, n))
        return end

    def begin(self, warp: Warp, i: Instruction, ready: int, unit) -> None:
        """Takes the unit and the scoreboards."""
        delay = LATENCY.get(i.kind, OTHERS)
        if i.busy:
            self.free[unit] = ready + i.busy
        if i.op == "LDG":
            sector = warp.block, warp.path.sectors.get(warp.at) or (warp.index, warp.at)
            delay = max(L1, self.loaded.setdefault(sector, ready + delay) - ready)
        for board, free in ((i.sets, ready + delay + i.busy), (i.frees, ready + READ)):
            if board < SCOREBOARDS:
                warp.boards[board] = max(warp.boards[board], free)
        if i.op == "LDGSTS":
            warp.copied = ready + LATENCY["LDG"]

    def pause(self, warp: Warp, n: int, i: Instruction, on: bool, ready: int) -> int | None:
        """The cycle in which the warp goes on; None where it waits at a barrier for others."""
        now = ready + i.stall
        if i.op == "LDGDEPBAR":
            warp.groups.append(warp.copied)
        elif i.op == "DEPBAR":
            left = int(i.args[-1], 16)
            return max(now, warp.groups[-1 - left]) if len(warp.groups) > left else now
        elif on and i.op == "BAR":
            return self.meet(warp, n, i, now)
        return now

    def meet(self, warp: Warp, n: int, i: Instruction, now: int) -> int | None:
        threads = int(i.args[1], 16) if len(i.args) > 1 and i.args[1].startswith("0x") else 32 * self.size
        party, stays = self.waiting[warp.block, i.args[0]], "ARV" not in i.mods
        party.append((now, n if stays else None))
        if 32 * len(party) < threads:
            return None if stays else now
        until = max(time for time, _ in party) + LATENCY["BAR"]
        for _, other in party[:-1]:
            if other is not None:
                heapq.heappush(self.queue, (until, other))
        party.clear()
        return until if stays else now


def blocking_loads(code: list[Instruction], steps: list[int]) -> int:
    """Loads of device memory that something waits for within a few instructions."""
    found = 0
    for k, step in enumerate(steps):
        if step >= 0 and code[step].op == "LDG":
            soon = (code[max(later, ~later)] for later in steps[k + 1 : k + 1 + BLOCKING])
            found += any(code[step].sets in i.waits for i in soon)
    return found


def milliseconds(blocks: float, fits: int, alone: float, full: float) -> float:
    """Of so many blocks in waves over the multiprocessors. One block by itself takes ``alone`` cycles, as many as fit ``full``."""
    cycles = 0.0
    while blocks > 0:
        at_once = min(fits, math.ceil(blocks / PROCESSORS))
        waves = max(blocks // (at_once * PROCESSORS), 1)
        cycles += waves * (alone + (at_once - 1) / max(fits - 1, 1) * (full - alone))
        blocks -= waves * at_once * PROCESSORS
    return cycles / CLOCK * 1e3
