"""Counts what the kernels of the recurrence execute, and models their time, on a machine without a GPU: ``tests/counts.sh``.

Each kernel is compiled as CuPy would compile it, and the path of every warp is followed through its machine code. The table is for
64 tokens of one sequence and head. Two numbers are the forward and the backward; a sum is for several kernels.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from fw_fairseq import Mistake
from fw_fairseq.feature_maps import AS_IS, ROW_MAPS, RowMap
from fw_fairseq.ops.kernels.recurrence import choose_parts
from fw_fairseq.rules import RULES

from .cases import TIERS, TYPES, Case
from .counted import DEVICES, SHAPES, Figures, count
from .lane import NotFollowed
from .machine_code import KINDS
from .model import PROCESSORS

OF_THE_DOCUMENTATION = ("sum", "gated", "delta", "gated_delta", "decay", "kda", "gdn2", "rwkv7")
SHOWN = ("forward", "backward")
MEASURED = {"forward": ("forward",), "forward and backward": ("forward of training", "backward")}  # passes of recipes/gpu_check
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


def show(head: list[str]) -> None:
    print(line(head), line("---" for _ in head), sep="\n", flush=True)


def line(cells) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def row(case: Case, architecture: str) -> list[str]:
    """Of the table: forward and backward."""
    counted = count(case, architecture)
    passes = [counted[name] for name in SHOWN]

    def both(text) -> str:
        return ", ".join(joined(x.kernels, text) for x in passes)

    return [
        str(case),
        *(joined(x.kernels, lambda kernel: f"{kernel.instructions:,}") for x in passes),
        both(lambda kernel: str(kernel.registers)),
        both(lambda kernel: str(kernel.spilled)),
        both(lambda kernel: str(kernel.fits)),
        both(lambda kernel: f"{kernel.code / 1024:.0f}"),
        both(lambda kernel: f"{kernel.blocking:g}"),
        *(", ".join(f"{x.modelled(n) / x.least[n]:.1f}" for x in passes) for n in range(len(SHAPES))),
    ]


def joined(kernels: list[Figures], text) -> str:
    return " + ".join(map(text, kernels))


def kinds(case: Case, architecture: str) -> list[list]:
    """Instructions by kind, of each kernel of each pass."""
    return [
        [f"{case}, {name}", kernel.kernel, *(kernel.kinds.get(kind, 0) for kind in KINDS), f"{kernel.guesses:g}"]
        for name, counted in count(case, architecture).items()
        for kernel in counted.kernels
    ]


def compared(measured: list[dict], architecture: str) -> Iterator[list[str]]:
    """For each time that recipes/gpu_check.sh measured of whole sequences: the model's, DRAM's, and the first over the larger."""
    cases: dict[Case, list[dict]] = {}
    for x in measured:
        sequences = x["batch"] * x["heads"]
        near_one = x.get("least_gate", 0.9) >= 0.9  # other gates may run in other tiers
        if x["aligned"] and near_one and choose_parts(sequences, x["tokens"], PROCESSORS) == 1:
            for_each = max(PROCESSORS // sequences, 1)
            cases.setdefault(Case(x["rule"], 64, "bf16", x["attention_norm"], processors=for_each), []).append(x)
    for case, times in cases.items():
        shapes = tuple({(x["batch"], x["heads"], x["tokens"]): None for x in times})
        counted = count(case, architecture, shapes)
        for x in times:
            n = shapes.index((x["batch"], x["heads"], x["tokens"]))
            passes = [counted[name] for name in MEASURED[x["pass"]]]
            modelled, least = sum(one.modelled(n) for one in passes), sum(one.least[n] for one in passes)
            numbers = [f"{ms:.3f}" for ms in (x["device_ms"], modelled, least)]
            sizes = f"{x['batch']} x {x['heads']} sequences and heads of {x['tokens']} tokens"
            name = f"{case.rule}{', attention normalisation' * case.attention_norm}, {sizes}"
            yield [name, x["pass"], *numbers, f"{x['device_ms'] / max(modelled, least):.2f}"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/counts.sh", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    rules = f"of {', '.join(RULES)}; default: {', '.join(OF_THE_DOCUMENTATION)}"
    parser.add_argument("--rules", nargs="+", choices=RULES, default=OF_THE_DOCUMENTATION, metavar="RULE", help=rules)
    parser.add_argument("--widths", nargs="+", type=int, default=[64], help="of keys and values; default: 64")
    parser.add_argument("--dtypes", nargs="+", choices=TYPES, default=["bf16"], help="bf16 (the default), fp16, fp32")
    parser.add_argument(
        "--attention-norm", action="store_true", help="with attention normalisation, which sum, gated and delta have"
    )
    parser.add_argument(
        "--feature-map", choices=[name for name in ROW_MAPS if name != AS_IS.name], metavar="MAP",
        help="with features of the keys and queries, divided by their sum: elu, relu or dpfp; dpfp has nu 1; default: none",
    )  # fmt: skip
    tier = "how chunks of decay run (docs/kernels.md): one_round (the default), small_gates, halves, split, levels"
    parser.add_argument("--tier", choices=[name.replace(" ", "_") for name in TIERS], metavar="TIER", help=tier)
    few = "processors for each sequence and head; with 2, an H100 has 64 of them; default: 1"
    parser.add_argument("--processors", type=int, default=1, metavar="N", help=few)
    parser.add_argument("--architecture", choices=DEVICES, default="90", help="compute capability; times are always an H100's")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--kinds", action="store_true", help="a table of instructions by kind, also for the forward of training")
    measured = "OUT/speed.json of recipes/gpu_check.sh: a table of all its times beside the model's"
    other.add_argument("--measured", type=Path, metavar="FILE", help=measured)
    args = parser.parse_args()
    if args.measured and not args.measured.is_file():
        parser.error(f"--measured is {args.measured}, which is no file")
    if args.measured:
        show(["", "pass", "measured, ms", "modelled", "by DRAM", "measured over the larger"])
        for cells in compared(json.loads(args.measured.read_text()), args.architecture):
            print(line(cells), flush=True)
        return 0
    row_map = RowMap(args.feature_map, 1, "sum") if args.feature_map else AS_IS
    show(["", "kernel", *KINDS, "branches on data, not taken"] if args.kinds else HEAD)
    for width, dtype, rule in itertools.product(args.widths, args.dtypes, args.rules):
        case = Case(rule, width, dtype, args.attention_norm, row_map, args.tier and args.tier.replace("_", " "), args.processors)
        try:
            rows = kinds(case, args.architecture) if args.kinds else [row(case, args.architecture)]
        except (Mistake, NotFollowed) as error:
            rows = [[str(case), f"not counted: {error}"]]
        print("\n".join(map(line, rows)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
