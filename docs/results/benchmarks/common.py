"""What the benchmarks of this folder share. They measure what the pages above report, from a checkout with this package installed:

python docs/results/benchmarks/layers.py --threads 1 --rounds 25 --json mixers.json
"""

from __future__ import annotations

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable

from fw_fairseq.tools.bench.contest import add_common, check, finish


def run(doc: str, add_arguments: Callable, measure: Callable[[Namespace], dict], table: Callable[[dict], str]) -> None:
    """Measures, prints the tables and writes the report."""
    parser = ArgumentParser(description=doc, formatter_class=ArgumentDefaultsHelpFormatter)
    add_arguments(parser)
    add_common(parser)
    args = parser.parse_args()
    check(parser, args)
    finish(args, measure(args), table)
