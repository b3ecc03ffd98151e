"""fw-bench: time and memory of fast weights and their peers, measured in one run."""

from __future__ import annotations

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser
from pathlib import Path

from ..command import check_figure, check_outputs, make_parser, mistakes_as_sentences
from ..plot.style import save
from . import language_models, ops, recurrent_models
from .contest import add_common, check, finish

PROG = "fw-bench"
EXAMPLE = "fw-bench ops --rules delta decay --tokens 512 2048 --json ops.json --figure ops.svg"
COMMANDS = {"ops": ops, "model": language_models, "transformers": recurrent_models}


def build_parser() -> ArgumentParser:
    """Returns the parser of the command line."""
    parser = make_parser(PROG, "Measures fast weights and their peers.", EXAMPLE)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        options = {"help": module.HELP, "description": module.DESCRIPTION}
        sub = commands.add_parser(name, formatter_class=ArgumentDefaultsHelpFormatter, **options)
        module.add_arguments(sub)
        add_common(sub)
        sub.add_argument("--figure", type=Path, help=f"file for a plot of {module.PLOT} (png, svg or pdf; needs matplotlib)")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Measures what the command line asks for."""
    parser = build_parser()
    args = parser.parse_args(argv)
    with mistakes_as_sentences(PROG):
        check_outputs((name, path) for name, path in (("--json", args.json), ("--figure", args.figure)) if path)
        if args.figure:
            check_figure("--figure", args.figure)
        check(parser, args)
        module = COMMANDS[args.command]
        report = module.measure(args)
        finish(args, report, module.table)
        if args.figure:
            save(module.draw(report), [args.figure])


if __name__ == "__main__":
    main()
