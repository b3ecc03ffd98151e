"""What the scripts of this folder share: the lines that recipes collect, tables, points, and the options --out and --table.

The scripts draw the figures of the pages above and print their tables, from a checkout with this package installed:

    python docs/results/figures/retrieval.py capacity docs/results/retrieval.txt --published --table --out retrieval.svg
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from math import isfinite, nan
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fw_fairseq.tools.plot.colours import colour_of, look
from fw_fairseq.tools.plot.style import legend, save


def parser(doc: str, names: Iterable[str] = ()) -> argparse.ArgumentParser:
    """Returns a parser with the name of a figure, the file that it is drawn of, --out and --table."""
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if names:
        found.add_argument("figure", choices=names)
    found.add_argument("file", type=Path, help="what a recipe collected, or the page with its table")
    found.add_argument("--out", type=Path, nargs="+", default=[], help="files to write, .svg, .pdf or .png")
    found.add_argument("--table", action="store_true", help="print the values as Markdown")
    return found


def finish(args: argparse.Namespace, draw: Callable[[], Any], table: Callable[[], str] | None = None) -> None:
    """Prints the table and writes the figure, whichever is asked for."""
    if args.table and table:
        print(table())
    if args.out:
        save(draw(), args.out)


def read_lines(path: Path, *kinds: Callable) -> list[list]:
    """Returns the words of each line, each as the type at its place."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.split()
        if len(words) != len(kinds):
            sys.exit(f"{path}, line {number} has {len(words)} words; it must have {len(kinds)}")
        found.append([kind(word) for kind, word in zip(kinds, words)])
    return found


def read_results(path: Path) -> dict[str, dict[int, float]]:
    """Returns the value by model and number of keys, pairs or elements."""
    found: dict[str, dict[int, float]] = {}
    for model, size, value in read_lines(path, str, int, float):
        found.setdefault(model, {})[size] = value
    return found


def markdown(corner: str, columns: Iterable, rows: dict[str, Iterable[str]]) -> str:
    """A table of numbers: a row of cells for each name, below the columns' heads."""
    heads = [str(column) for column in columns]
    lines = [f"| {corner} | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    return "\n".join(lines + [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()])


def cell(values: list[float], digits: int = 1) -> str:
    """The mean, ± the deviation of several seeds, or nothing. A mean that is not finite has no deviation."""
    whole = mean(values) if values else nan
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 and isfinite(whole) else ""
    return f"{whole:.{digits}f}{spread}" if values else ""


def draw_points(figure: Any, axes: Any, rows: dict[str, dict[str, list[float]]], labels: dict[str, str]) -> None:
    """Draws a row for each name, the first on top, and in it the values of each kind that has a label, with a look of its own; the
    first kind is hollow. A single kind has the colour of each row and no legend."""
    shared = {"ls": "", "clip_on": False}
    for index, (sort, label) in enumerate(labels.items()):
        points = [(value, at) for at, kinds in enumerate(rows.values()) for value in kinds.get(sort, ())]
        if points and len(labels) > 1:
            color, _, marker = look(index)
            axes.plot(*zip(*points), label=label, color=color, marker=marker, mfc=color if index else "white", mew=1.1, **shared)
    if len(labels) == 1:
        for at, (name, kinds) in enumerate(rows.items()):
            [values] = kinds.values()
            axes.plot(values, [at] * len(values), marker="o", color=colour_of(name), mfc="white", mew=1.8, **shared)
    axes.set_yticks(range(len(rows)), [name.replace("_", " ") for name in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    if len(labels) > 1:
        legend(figure, axes)
