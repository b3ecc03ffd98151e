"""Counts what the kernels of the recurrence execute, and models their time, on a machine without a GPU: ``tests/counts.sh``.

Each kernel is compiled as CuPy would compile it, and the path of every warp is followed through its machine code. The table is for
64 tokens of one sequence and head. Two numbers are the forward and the backward; a sum is for several kernels.
"""

from __future__ import annotations

import argparse
import itertools

from fw_fairseq import Mistake
from fw_fairseq.rules import RULES

from .cases import TYPES, Case
from .counted import DEVICES, SHAPES, Figures, count
from .lane import NotFollowed
from .machine_code import KINDS

OF_THE_DOCUMENTATION = ("sum", "gated", "delta", "gated_delta", "decay", "kda", "gdn2", "rwkv7")
SHOWN = ("forward", "backward")
HEAD = [
    "",
    "instructions, forward",
    "backward",
    "registers",
    "bytes spilled",
    "blocks on a processor",
    "KB of code",
    "loads that block",
]
HEAD += [f"modelled time over DRAM's, {b} x {h} sequences and heads of {t} tokens" for b, h, t in SHAPES]


def line(cells) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def both(passes: list[list[Figures]], text) -> str:
    """``text`` of the kernels of the forward and of the backward."""
    return ", ".join(" + ".join(text(kernel) for kernel in kernels) for kernels in passes)


def row(case: Case, architecture: str) -> list[str]:
    counted = count(case, architecture)
    passes = [counted[name][0] for name in SHOWN]
    times = [
        ", ".join(f"{sum(kernel.ms[n] for kernel in counted[name][0]) / counted[name][1][n]:.1f}" for name in SHOWN)
        for n in range(len(SHAPES))
    ]
    return [
        str(case),
        *(" + ".join(f"{kernel.instructions:,}" for kernel in kernels) for kernels in passes),
        both(passes, lambda kernel: str(kernel.registers)),
        both(passes, lambda kernel: str(kernel.spilled)),
        both(passes, lambda kernel: str(kernel.fits)),
        both(passes, lambda kernel: f"{kernel.code / 1024:.0f}"),
        both(passes, lambda kernel: f"{kernel.blocking:g}"),
        *times,
    ]


def kinds(case: Case, architecture: str) -> list[list]:
    """Instructions by kind, of each kernel of each pass."""
    counted = count(case, architecture)
    return [
        [f"{case}, {name}", kernel.kernel, *(kernel.kinds.get(kind, 0) for kind in KINDS), f"{kernel.guesses:g}"]
        for name, (kernels, _) in counted.items()
        for kernel in kernels
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/counts.sh", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    rules = f"of {', '.join(RULES)}; default: {', '.join(OF_THE_DOCUMENTATION)}"
    parser.add_argument("--rules", nargs="+", choices=RULES, default=OF_THE_DOCUMENTATION, metavar="RULE", help=rules)
    parser.add_argument("--widths", nargs="+", type=int, default=[64], help="of keys and values; default: 64")
    parser.add_argument("--dtypes", nargs="+", choices=TYPES, default=["bf16"], help="bf16 (the default), fp16, fp32")
    parser.add_argument(
        "--attention-norm", action="store_true", help="with attention normalisation, which sum, gated and delta have"
    )
    parser.add_argument("--architecture", choices=DEVICES, default="90", help="compute capability; times are always an H100's")
    parser.add_argument(
        "--kinds", action="store_true", help="a table of instructions by kind instead, also for the forward of training"
    )
    args = parser.parse_args()
    head = ["", "kernel", *KINDS, "branches on data, not taken"] if args.kinds else HEAD
    print(line(head), line("---" for _ in head), sep="\n", flush=True)
    for width, dtype, rule in itertools.product(args.widths, args.dtypes, args.rules):
        case = Case(rule, width, dtype, args.attention_norm)
        try:
            rows = kinds(case, args.architecture) if args.kinds else [row(case, args.architecture)]
        except (Mistake, NotFollowed) as error:
            rows = [[str(case), f"not counted: {error}"]]
        print("\n".join(map(line, rows)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
