"""fw-bench: time and memory of fast weights and their peers, measured in one run."""

from __future__ import annotations

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser

from ..command import make_parser, mistakes_as_sentences
from . import language_models, ops
from .contest import add_common, check, finish

PROG = "fw-bench"
EXAMPLE = "fw-bench ops --rules delta decay --tokens 512 2048 --json ops.json --figure ops.svg"
COMMANDS = {"ops": ops, "model": language_models}


def build_parser() -> ArgumentParser:
    """Returns the parser of the command line."""
    parser = make_parser(PROG, "Measures fast weights and their peers.", EXAMPLE)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        options = {"help": module.HELP, "description": module.DESCRIPTION}
        sub = commands.add_parser(name, formatter_class=ArgumentDefaultsHelpFormatter, **options)
        module.add_arguments(sub)
        add_common(sub, module.PLOT)
    return parser


def main(argv: list[str] | None = None) -> None:
    """Measures what the command line asks for."""
    parser = build_parser()
    args = parser.parse_args(argv)
    with mistakes_as_sentences(PROG):
        check(parser, args)
        module = COMMANDS[args.command]
        finish(args, module.measure(args), module.table, module.draw)


if __name__ == "__main__":
    main()
