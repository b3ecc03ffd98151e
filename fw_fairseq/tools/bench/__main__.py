"""fw-bench: time and memory of fast weights and their peers, measured in one run."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import NamedTuple

# Huge pages for every contender's large tensors, or page faults are a good part of what is timed. Before torch allocates.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch

from ...errors import Mistake
from ..command import check_outputs, make_parser, mistakes_as_sentences, refuse_folder
from . import language_models, layers, ops, sparse, translation
from .contest import positive, progress, write_json

PROG = "fw-bench"
EXAMPLE = "fw-bench ops --rules delta decay --tokens 512 2048 --json ops.json --figure ops.svg"


class Command(NamedTuple):
    module: object  # with add_arguments, measure, table and draw
    help: str
    description: str
    plot: str


COMMANDS = {
    "ops": Command(
        ops,
        "the recurrence itself, forward and backward",
        "Every rule against its step loop, softmax attention, a cumulative sum and, on a GPU, flash-linear-attention.",
        "time against length",
    ),
    "model": Command(
        language_models,
        "whole language models, training and generation: time and memory of any rule or mixer",
        "fast_weight_lm with any rules and mixers against fairseq's transformer_lm of the same size, with random weights.",
        "time and state against context",
    ),
    "mixers": Command(
        layers,
        "SRU against LSTM, additive attention against softmax attention",
        "Forward and backward of one layer: sru against torch's LSTM, additive and leap against softmax attention.",
        "time of each",
    ),
    "sparse": Command(
        sparse,
        "a token of large models on a CPU, from dense to sparse and recurrent",
        "fast_weight_lm without a batch, with random weights: softmax attention and dense layers first, then part after part"
        " becomes sparse, and gated_delta takes the place of softmax attention. One model at a time is in memory.",
        "speed against context",
    ),
    "translate": Command(
        translation,
        "beam search of translation models",
        "fast_weight_transformer, all attentions linear, against fairseq's transformer of the same size, with random weights,"
        " through fairseq's SequenceGenerator; sources are as long as their translations.",
        "speed against length",
    ),
}


def build_parser() -> argparse.ArgumentParser:
    parser = make_parser(PROG, "Measures fast weights and their peers.", EXAMPLE)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, command in COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.help,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            description=command.description,
        )
        command.module.add_arguments(sub)
        sub.add_argument("--device", default="cpu", help="cpu or cuda")
        sub.add_argument("--rounds", type=positive, default=7, help="timed rounds, after one that is not timed")
        if name != "sparse":  # which has several numbers of them, --try-threads
            sub.add_argument("--threads", type=positive, default=torch.get_num_threads(), help="CPU threads")
        sub.add_argument("--json", type=Path, help="file to write all measurements to")
        sub.add_argument("--figure", type=Path, help=f"file for a plot of {command.plot} (png, svg or pdf; needs matplotlib)")
    return parser


def main(argv: list[str] | None = None) -> None:
    parser = build_parser()
    args = parser.parse_args(argv)
    check(parser, args)
    with mistakes_as_sentences(PROG):
        check_files(args)
        run(args)


def check(parser: argparse.ArgumentParser, args) -> None:
    """Refuses options that do not fit each other or this machine."""
    if args.command == "sparse" and args.device != "cpu":
        parser.error(f"sparse measures a CPU; leave out --device {args.device}")
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {args.device} needs a CUDA device, and torch sees none; use --device cpu")
    if getattr(args, "no_decoding_graph", False) and args.device == "cpu":
        parser.error("--no-decoding-graph needs --device cuda; a CPU has no such graphs")
    for path in filter(None, (args.json, args.figure)):
        if not path.absolute().parent.is_dir():
            parser.error(f"{path.parent} is not a folder; make it first")
    if "width" in args and args.width % args.heads:
        parser.error(f"--width {args.width} is not a multiple of --heads {args.heads}")
    if getattr(args, "host", False):
        useless = [name for name in ("resume", "figure", "no_decoding_graph") if getattr(args, name)]
        if useless:
            parser.error(f"--host goes without --{useless[0].replace('_', '-')}; leave it out")
    if getattr(args, "resume", False) and not args.json:
        parser.error("--resume needs --json, the file with the report to continue")


def check_files(args) -> None:
    """Refuses one file for two outputs, and to write over a file that is no report."""
    check_outputs((name, path) for name, path in (("--json", args.json), ("--figure", args.figure)) if path)
    for name, path in (("--json", args.json), ("--figure", args.figure)):
        if path:
            refuse_folder(name, path)
    if args.figure and args.figure.suffix not in (".svg", ".pdf", ".png"):
        raise Mistake(f"--figure is {args.figure}; it must end in .svg, .pdf or .png")
    if args.json and args.json.is_file() and not is_report(args.json):
        raise Mistake(f"--json is {args.json}, which is no report of fw-bench and would be lost; name another file")


def is_report(file: Path) -> bool:
    try:
        return "settings" in json.loads(file.read_text())
    except (ValueError, TypeError):
        return False


def run(args) -> None:
    torch.set_num_threads(args.threads)
    module = COMMANDS[args.command].module
    report = module.measure(args)
    progress("")
    print(module.table(report))
    if args.json:
        write_json(args.json, report)
    if args.figure:
        module.draw(report, args.figure)


if __name__ == "__main__":
    main()
