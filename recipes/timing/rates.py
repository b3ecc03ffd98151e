"""What GPUs do in a second, as this model assumes it, and the time of an update at these rates."""

from __future__ import annotations

from typing import Any, NamedTuple

PRECISIONS = ("bf16", "fp16", "tf32", "fp32")
WMT14_PAIRS = 4.5e6  # sentence pairs after filtering, about
ATTENTION = 0.25  # of the rate of products: softmax attention
BACKWARD = 2.5  # of the multiply-adds of attention forward
LAUNCH = 5.5e-6  # seconds of the host for each launch
COPIES = 12  # bytes of a parameter: a gradient to fp32, and the parameter back from there
MEASURED = {
    "linear": 1.18,
    "decay": 1.18,
    "delta": 1.1,
    "channel_delta": 1.1,
}  # of the modelled time of kernels (docs/results/gpu.md)


class Gpu(NamedTuple):
    """Operations in a second by precision and bytes in a second, as large products and copies reach them; cycles of all
    multiprocessors in a second."""

    products: dict[str, float]
    memory: float
    cycles: float


H100 = {"bf16": 500e12, "fp16": 500e12, "tf32": 250e12, "fp32": 45e12}
A100 = {"bf16": 200e12, "fp16": 200e12, "tf32": 100e12, "fp32": 15e12}
GPUS = {
    "A100": Gpu(A100, 1.6e12, 108 * 1.41e9),
    "H100": Gpu(H100, 2.7e12, 132 * 1.755e9),
    "H200": Gpu(H100, 3.9e12, 132 * 1.755e9),
}


class Update(NamedTuple):
    """Seconds of one update by what takes them, and its launches."""

    products: float
    other: float
    attention: float
    kernels: float
    optimizer: float
    launches: float

    @property
    def device(self) -> float:
        return sum(self[:5])

    @property
    def host(self) -> float:
        return self.launches * LAUNCH


def number_size(precision: str) -> int:
    """Bytes of a number in floating point."""
    return 2 if precision in ("bf16", "fp16") else 4


def extended(counts: dict[str, Any], name: str) -> tuple[list[list], float]:
    """The work of one pass for the whole batch, on a straight line through those of two and of three sequences, and its launches.
    Where longer batches take more operations, as a loss in chunks, those of one kind are added up."""
    two, three = (sequences[name] for sequences in counts["sequences"])
    further, launches = counts["batch"] - 2, [len(two), len(three)]
    if [work[0] for work in two] != [work[0] for work in three]:
        two, three = added_up(two), added_up(three)
    work = [[a[0], *(x + (y - x) * further for x, y in zip(a[1:], b[1:]))] for a, b in zip(two, three)]
    return work, launches[0] + (launches[1] - launches[0]) * further


def added_up(work: list[list]) -> list[list]:
    kinds = ("product", "other", "kernel")
    return [[kind, *(sum(x[i] for x in work if x[0] == kind) for i in (1, 2, 3))] for kind in kinds]


def seconds(work: list[list], kind: str, gpu: Gpu, precision: str, size: int) -> float:
    """Of the operations of this kind, each by its multiply-adds or by its bytes, whichever take longer."""
    rate = gpu.products[precision]
    return sum(max(2 * products / rate, (size * n + other) / gpu.memory) for k, products, n, other in work if k == kind)


def update(counts: dict[str, Any], gpu: Gpu, precision: str, kernel_ms) -> Update:
    """``kernel_ms(kernel, sequences, precision)``: forward and backward of a kernel on an H100."""
    size, often = number_size(precision), counts["micro_batches"]
    (forward, ahead), (backward, back) = extended(counts, "forward"), extended(counts, "backward")
    work = forward + backward
    products, other = (often * seconds(work, kind, gpu, precision, size) for kind in ("product", "other"))
    two, three = (sequences["attention"] for sequences in counts["sequences"])
    attention = 2 * (1 + BACKWARD) * (two + (three - two) * (counts["batch"] - 2)) / (ATTENTION * gpu.products[precision])
    kernels = sum(kernel_ms(kernel, counts["batch"], precision) for kernel in counts["sequences"][0]["kernels"]) / 1e3
    steps = counts["optimizer"]["flat" if size == 2 else "each"]
    optimizer = sum(4 * n + others for _, _, n, others in steps) / gpu.memory
    optimizer += COPIES * counts["parameters"] / gpu.memory if size == 2 else 0
    scale = GPUS["H100"].cycles / gpu.cycles
    return Update(products, other, often * attention, often * kernels * scale, optimizer, often * (ahead + back) + len(steps))


def tokens(counts: dict[str, Any]) -> float:
    """Of one update, on one GPU."""
    return counts["batch"] * counts["length"] * counts["micro_batches"]


def updates(counts: dict[str, Any]) -> float:
    """Of the whole run."""
    if counts["updates"]:
        return counts["updates"]
    return counts["epochs"] * WMT14_PAIRS * counts["length"] / (tokens(counts) * counts["workers"])
