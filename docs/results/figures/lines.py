"""What the scripts of this folder share: the lines that recipes collect, tables, points, and the options --out and --table.

The scripts draw the figures of the pages above and print their tables, from a checkout with this package installed:

    python docs/results/figures/retrieval.py capacity docs/results/retrieval.txt --published --table --out retrieval.svg
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from math import inf, isfinite, nan
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from fw_fairseq.tools.plot.style import SMALL, legend, look, save

LINE = 1.15 * SMALL  # from one name to the next
BESIDE = 1.07  # where names right of the axes begin, in widths of the axes


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
    first kind is hollow."""
    for index, (sort, label) in enumerate(labels.items()):
        points = [(value, at) for at, kinds in enumerate(rows.values()) for value in kinds.get(sort, ())]
        if points:
            style = {"color": look(index).color, "marker": look(index).marker, "ms": 3.4, "ls": "", "mew": 0.7, "clip_on": False}
            axes.plot(*zip(*points), label=label, mfc=style["color"] if index else "white", **style)
    axes.set_yticks(range(len(rows)), [name.replace("_", " ") for name in rows], fontsize=SMALL)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    legend(figure, axes)


def label_ends(axes: Any, ends: list[tuple[str, tuple[float, float], str]]) -> None:
    """Writes names right of the axes, (label, last point, colour), in the order of their heights and without overlap. Where the
    figure has no room for a name the axes become narrower."""
    height = 72 * axes.get_window_extent().height / axes.figure.dpi
    to_axes = axes.transData + axes.transAxes.inverted()
    wanted = [to_axes.transform(point)[1] for _, point, _ in ends]
    for (label, point, colour), at in zip(ends, spread_out(wanted, LINE / height, 0.02, 0.98)):
        leader = {"arrowstyle": "-", "lw": 0.4, "color": colour, "relpos": (0, 0.5), "shrinkA": 0.5, "shrinkB": 2.5}
        axes.annotate(
            label, point, (BESIDE, at), textcoords="axes fraction", va="center", fontsize=SMALL, color=colour, arrowprops=leader,
            annotation_clip=False,
        )  # fmt: skip
    widest = max((_text_width(text) for text in axes.texts), default=0.0)
    figure, box = axes.figure, axes.get_window_extent()
    width = (figure.bbox.width - box.x0 - widest) / BESIDE
    if width < box.width:
        figure.subplots_adjust(right=(box.x0 + width) / figure.bbox.width)


def _text_width(text: Any) -> float:
    """Pixels, without the leader of an annotation."""
    from matplotlib.text import Text

    return Text.get_window_extent(text).width


def spread_out(wanted: list[float], gap: float, low: float = -inf, high: float = inf) -> list[float]:
    """Returns places in the same order, at least ``gap`` apart, and within the bounds if they fit."""
    groups: list[list[int]] = []

    def places(group: list[int]) -> list[float]:
        middle = sum(wanted[i] for i in group) / len(group)
        return [middle + gap * (n - (len(group) - 1) / 2) for n in range(len(group))]

    for index in sorted(range(len(wanted)), key=lambda i: wanted[i]):
        groups.append([index])
        while len(groups) > 1 and places(groups[-1])[0] - places(groups[-2])[-1] < gap:
            groups[-2:] = [groups[-2] + groups[-1]]
    order = [(i, at) for group in groups for i, at in zip(group, places(group))]
    inside = [max(min(at, high - gap * (len(order) - 1 - n)), low + gap * n) for n, (_, at) in enumerate(order)]
    return [at for _, at in sorted(zip((i for i, _ in order), inside))]
