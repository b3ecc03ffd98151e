"""What the benchmarks of this folder share. They measure what the pages above report, from a checkout with this package installed:

python docs/results/benchmarks/layers.py --threads 1 --rounds 25 --json mixers.json --figure mixers.svg
"""

from __future__ import annotations

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from fw_fairseq.tools.bench.contest import add_common, check, finish


def run(
    doc: str, add_arguments: Callable, measure: Callable[[Namespace], dict], table: Callable, draw: Callable[[dict], Any]
) -> None:
    """Measures, prints the tables and writes the report's files."""
    parser = ArgumentParser(description=doc, formatter_class=ArgumentDefaultsHelpFormatter)
    add_arguments(parser)
    add_common(parser, "it")
    args = parser.parse_args()
    check(parser, args)
    finish(args, measure(args), table, save_with(draw))


def save_with(draw: Callable[[dict], Any]) -> Callable:
    """Returns a function that writes a report's figure."""
    from fw_fairseq.tools.plot.style import save

    return lambda report, path: save(draw(report), [path])
