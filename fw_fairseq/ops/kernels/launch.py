"""What the modules of all kernels share: the launcher in use, checks, tensors, parameters and feature maps."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from ...errors import Mistake
from ...feature_maps import AS_IS, NORMS, ROW_MAPS, RowMap
from .compiler import CupyLaunch, Launcher
from .family import Divided
from .parameters import DIVIDED_VIEWS, OF_DIVIDED, ROWS, SHARES, Kernel, Structure, remember

logger = logging.getLogger(__name__)
OLDEST = (8, 0)  # compute capability: the first with products of bf16 and tf32
SHARED = 99 * 1024  # bytes of shared memory that every device since compute capability 8.0 gives a block
TYPES = {torch.float32: "float", torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}  # what kernels read and write
SHARED_MORE = {(8, 0): 163 * 1024, (8, 7): 163 * 1024, (9, 0): 227 * 1024, (10, 0): 227 * 1024, (10, 3): 227 * 1024}
PRECISIONS = {"bf16": 0, "tf32": 1, "exact": 2, "fp16": 3}  # FW_PRECISION
OPERANDS = {"bf16": torch.bfloat16, "tf32": torch.float32, "exact": torch.float32, "fp16": torch.float16}  # of products
# the precision of kernels without products of fp16: tf32 holds it exactly, and bf16 would round it once more
IN_TF32 = {"bf16": "bf16", "tf32": "tf32", "exact": "exact", "fp16": "tf32"}
SHORTEST_PART = 256  # tokens of a block of the backward where several take a sequence
LAUNCHES: dict[tuple, tuple] = {}  # of prepared ones: what starts it, the numbers, and the places of the addresses among them
_launcher: Any = CupyLaunch()


def current() -> Any:
    """The launcher in use."""
    return _launcher


def has_kernels(x: Tensor) -> bool:
    """Whether kernels run on the device of x; whether one fits is another question."""
    return x.device.type == _launcher.device_type


def launcher_for(x: Tensor) -> Launcher | None:
    """The launcher in use, where it is for the device of x."""
    return _launcher if x.device.type == _launcher.device_type else None


@contextlib.contextmanager
def use(launcher: Any) -> Iterator[Any]:
    """Launches with ``launcher`` instead of CuPy inside the context, for tests without a GPU."""
    global _launcher
    previous, _launcher = _launcher, launcher
    try:
        yield launcher
    finally:
        _launcher = previous


def use_kernels(backend: str, device: torch.device, why_not: Callable[[], str | None]) -> bool:
    """Whether an operation with kernels and one PyTorch form takes the kernels; ``why_not()`` says why it cannot, or None."""
    if backend not in ("auto", "torch", "cuda"):
        raise Mistake(f"backend is {backend!r}; allowed: auto, torch, cuda")
    if backend == "torch" or (backend == "auto" and device.type != _launcher.device_type):
        return False
    reason = why_not()
    if reason and backend == "cuda":
        raise Mistake(reason)
    if reason:
        log_once(reason)
    return not reason


@functools.cache
def log_once(reason: str, instead: str = "running the PyTorch form instead") -> None:
    """Says once in the log what is missing, and what runs instead."""
    logger.warning(f"{reason}; {instead}")


def why_not_run(*inputs: Tensor) -> str | None:
    """A sentence that says why no kernel runs on this device or takes these dtypes; None where one can."""
    if reason := _launcher.why_not(inputs[0].device):
        return reason
    for x in inputs:
        if x.dtype not in TYPES:
            return f"backend='cuda' has kernels for {', '.join(map(str, TYPES))}, not for {x.dtype}"
    return None


def why_no_map(row_map: RowMap) -> str | None:
    """A sentence that says why the kernels cannot make these features; None where they can."""
    for kind, name, table in (("feature map", row_map.name, ROW_MAPS), ("norm", row_map.norm, NORMS)):
        if table[name].number is None:
            able = ", ".join(known for known, entry in table.items() if entry.number is not None)
            return f"backend='cuda' has no {kind} {name!r} in its kernels, which have: {able}"
    return None


def map_defines(row_map: RowMap, width: int) -> dict[str, Any]:
    """The macros of ``cuda/row_map.cuh`` for rows this wide; none for rows that are features already."""
    if row_map == AS_IS:
        return {}
    if reason := why_no_map(row_map):
        raise Mistake(reason)
    numbers = {"FW_MAP": ROW_MAPS[row_map.name].number, "FW_NORM": NORMS[row_map.norm].number}
    return numbers | {"FW_D": width, "FW_NU": row_map.nu}


def dense(x: Tensor) -> Tensor:
    """x with its last dimension contiguous, which every kernel relies on."""
    return x if x.stride(-1) == 1 else x.contiguous()


def in_units(x: Tensor) -> bool:
    """Whether every row of x can be moved 16 bytes at a time."""
    steps = functools.reduce(operator.or_, x.stride()[:-1], x.shape[-1])  # a power of 2 divides all of them if it divides this
    return (steps * x.element_size() | x.data_ptr()) % 16 == 0


def remembered(function: Callable) -> Callable:
    """Decorates a function of sizes: each result is computed once, but for sizes that a compiler keeps symbolic."""
    known = functools.lru_cache(maxsize=None)(function)

    @functools.wraps(function)
    def run(*sizes) -> Any:
        try:
            return known(*sizes)
        except TypeError:  # symbolic ones cannot be hashed
            return function(*sizes)

    return run


def round_up(n: int, multiple: int) -> int:
    """The least multiple that is no less than n."""
    return (n + multiple - 1) // multiple * multiple


def tile_bytes(*tiles: tuple[int, int, torch.dtype]) -> int:
    """The bytes of tiles in shared memory (``tile_stride`` in cuda/tile.cuh), by their rows, width and type: each row is 16 bytes
    longer than its data."""
    return sum(rows * (width * dtype.itemsize + 16) for rows, width, dtype in tiles)


def start(
    launcher: Any, structure: Structure, settings: Hashable, tensors: dict[str, Tensor | None], describe: Callable[[], Kernel]
) -> None:
    """Starts the kernel that ``describe()`` makes of the tensors and ``settings``, which are all that it may look at. It is asked
    once for tensors of these shapes, strides, types and alignments."""
    given = tensors.values()
    addresses = [0 if x is None else x.data_ptr() for x in given]
    layout = [None if x is None else (x.shape, x.stride(), x.dtype, x.device, at % 16) for x, at in zip(given, addresses)]
    key = (launcher, structure, settings, *layout)
    try:
        launch = LAUNCHES[key]
    except KeyError:
        kernel = describe()
        device = next(x.device for x in given if x is not None)
        begin = launcher.prepare(*kernel[:6], device, structure.dtype)
        places = [structure.places[name] for name in tensors]
        launch = remember(LAUNCHES, key, (begin, structure.numbers(tensors, kernel.sizes), places))
    begin, numbers, places = launch
    numbers = numbers[:]
    for place, address in zip(places, addresses):
        numbers[place] = address
    begin(structure.pack(*numbers))


def rows_aligned(tensors: dict[str, Any]) -> bool:
    """Whether all rows of inputs and of their gradients can be moved 16 bytes at a time; says once where they cannot."""
    rows = [x[0] if name in SHARES else x for name, x in tensors.items() if name in ROWS and x is not None]
    aligned = all(map(in_units, rows))
    if not aligned:
        log_once("rows of q, k or v do not start at multiples of 16 bytes", "kernels move their numbers one by one, which is slow")
    return aligned


def sizes_of(q: Tensor, key: int, value: int, divisor: tuple[float, float] = (0.0, 0.0)) -> dict[str, float]:
    """The numbers of ``PARAMS``. divisor: eps and least."""
    return {"H": q.shape[1], "T": q.shape[2], "K": key, "V": value, "eps": divisor[0], "least": divisor[1]}


def tokens_of_part(launcher: Launcher, dy: Tensor, tiles: int, multiple: int) -> int:
    """How many tokens a block of the backward takes, a multiple of this: all of them, unless half of the device would be idle."""
    processors, blocks, tokens = launcher.processors(dy.device), dy.shape[0] * dy.shape[1] * tiles, dy.shape[2]
    count = min(2 * processors // blocks, tokens // SHORTEST_PART) if 0 < 2 * blocks <= processors else 1
    return round_up(-(-tokens // count), multiple) if count > 1 else tokens


def undivided(launcher: Launcher, divided: Divided, divisors: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of the reads before they are divided, (B,H,T,V), and of their divisors, (B,H,T), from that of ``divided.y``."""
    dx, ddivisors = torch.empty_like(dy), torch.empty_like(divisors)
    tensors = dict(zip(DIVIDED_VIEWS, (divided.y, dy, dx, divisors, ddivisors)))
    divisor = divided.eps, divided.least

    def describe() -> Kernel:
        assert divided.y is not None
        batch, heads, tokens, value = dy.shape
        aligned = all(in_units(x) for x in (divided.y, dy, dx))
        units, lanes = -(-value // (16 // dy.element_size() if aligned else 1)), 1
        while lanes < min(units, 32):
            lanes *= 2
        defines = {"FW_IN": TYPES[dy.dtype], "FW_ALIGNED": int(aligned), "FW_LANES": lanes}
        grid = (batch * heads * -(-tokens * lanes // 256),)
        sizes = {"H": heads, "T": tokens, "V": value, "eps": divisor[0], "least": divisor[1]}
        return Kernel("divided.cu", "divided_backward", defines, grid, (256,), 0, sizes)

    start(launcher, OF_DIVIDED, divisor, tensors, describe)
    return dx, ddivisors


def held_bytes(device: torch.device) -> int:
    """The bytes of shared memory that a block can have on this device, or on any if the launcher in use is for other ones."""
    return look_up_held(_launcher, device)


@functools.lru_cache(maxsize=64)
def look_up_held(launcher: Launcher, device: torch.device) -> int:
    """As ``held_bytes``, asked once."""
    return SHARED_MORE.get(launcher.capability(device), SHARED) if device.type == launcher.device_type else SHARED


def why_not_wide(kernels: str, q: Tensor, key: int, widest: int) -> str | None:
    """A sentence that says that ``kernels`` do not take keys this wide, or this device; None where they do."""
    if key > widest:
        return f"backend='cuda' has kernels {kernels} for keys up to {widest} wide, not {key}"
    if _launcher.capability(q.device) < OLDEST:
        return f"backend='cuda' has kernels {kernels} for compute capability {OLDEST[0]}.{OLDEST[1]} and higher only"
    return None


def why_not_held(q: Tensor, key: int, needed: int) -> str | None:
    """A sentence that says that the device has less shared memory than a block needs for keys this wide; None where it has it."""
    held = held_bytes(q.device)
    if needed <= held:
        return None
    return f"backend='cuda' needs {needed} bytes of shared memory for {q.dtype} keys {key} wide; this device has {held}"


def shares_of(wholes: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """Room for ``count`` fp32 shares that sum to each of these; for one share the whole itself, with a leading dimension of 1."""
    if count == 1:
        return {name: whole[None] for name, whole in wholes.items()}
    return {name: whole.new_empty((count, *whole.shape), dtype=torch.float32) for name, whole in wholes.items()}


def add_up(wholes: dict[str, Tensor], shares: dict[str, Tensor], count: int) -> None:
    """Writes the sums of the shares from ``shares_of`` into the wholes."""
    if count > 1:
        for name, whole in wholes.items():
            whole.copy_(shares[name].sum(0))
