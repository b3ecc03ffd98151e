"""Figures of recipes/wikitext2.

state: perplexity against the size of the state, of a page with the table of table.sh. conversion: the share of a Transformer's
performance that a conversion keeps, of a page with the table of conversion.sh. parts: perplexity of rules with and without the
parts around them, of lines of ROW SEED PERPLEXITY SLIDING.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from lines import cell, draw_points, finish, markdown, parser, read_lines

from fw_fairseq.tools.plot.colours import ink, looks
from fw_fairseq.tools.plot.style import LINE, SMALL, canvas, label_ends, log_lengths, plot, spread_out

# The endings of rows in recipes/mixers.sh, in the order of the columns.
PARTS = {
    "": "none", "conv": "short convolution", "norm": "output norm", "gate": "output gate", "parts": "all three",
    "published": "as published",
}  # fmt: skip


def read_table(path: Path, *columns: str) -> dict[str, tuple[float, ...]]:
    """Returns the numbers in the columns that begin with these words, by row, of the first table that has them. 2.5M is none."""
    places: list[int] = []
    found: dict[str, tuple[float, ...]] = {}
    for line in path.read_text().splitlines():
        cells = [cell.strip(" `*") for cell in line.split("|")[1:-1]]
        if not places:
            at = [[i for i, cell in enumerate(cells) if cell.startswith(words)] for words in ("row", *columns)]
            places = [found[0] for found in at] if all(at) else []
        elif not cells:
            break
        else:
            given = [cells[place].replace(",", "") for place in places]
            numbers = [re.match(r"\d+(\.\d+)?(e[+-]?\d+)?(?![\w.])", number) for number in given[1:]]
            if all(numbers):
                found[given[0]] = tuple(float(number[0]) for number in numbers if number)
    return found or sys.exit(f"{path} has no table with the columns row, {', '.join(columns)}")


def draw_state(rows: dict[str, tuple[float, ...]]) -> Any:
    """Draws a point for each model, with its name beside it."""
    figure, [axes] = canvas(3.8)
    styles = looks(rows)
    for name, point in rows.items():
        axes.plot(*point, ls="", ms=7, marker=styles[name].marker, color=styles[name].color)
    sizes = sorted(size for size, _ in rows.values())
    axes.set(xscale="log", xlabel="numbers kept of a text", ylabel="test perplexity", xlim=(sizes[0] / 6, sizes[-1] * 12))
    figure.draw_without_rendering()
    low, high = axes.get_ylim()
    gap = (high - low) * LINE / (72 * axes.get_window_extent().height / figure.dpi)
    for left in (True, False):
        side = {name: point for name, point in rows.items() if (point[0] < sizes[len(sizes) // 2]) == left}
        for (name, (size, perplexity)), at in zip(side.items(), spread_out([y for _, y in side.values()], gap)):
            colour = styles[name].color
            leader = {"arrowstyle": "-", "lw": 0.6, "color": colour, "relpos": (left, 0.5), "shrinkA": 0.5, "shrinkB": 2}
            axes.annotate(
                name.replace("_", " "), (size, perplexity), (size / 1.5 if left else size * 1.5, at), va="center",
                ha="right" if left else "left", fontsize=SMALL, color=ink(colour), arrowprops=leader,
            )  # fmt: skip
    return figure


def draw_conversion(rows: dict[str, tuple[float, ...]]) -> Any:
    """Draws a line for each rule and variant, from rows named RULE-M and RULE-M-VARIANT; softmax attention is 100%."""
    lines: dict[str, dict[int, float]] = {}
    for row, (share,) in rows.items():
        if found := re.fullmatch(r"([a-z_]+)-(\d+)(-[a-z]+)?", row):
            rule, m, otherwise = found.groups()
            lines.setdefault(rule.replace("_", " ") + (otherwise or "").replace("-", ", "), {})[int(m)] = share
    figure, [axes] = canvas()
    for name, style in looks(lines).items():
        plot(axes, style, name, lines[name])
    axes.set(xlabel="m, features a head", ylabel="% of softmax performance")
    log_lengths(axes, (m for points in lines.values() for m in points))
    label_ends(axes)
    return figure


def read_parts(path: Path, sliding: bool) -> dict[str, dict[str, list[float]]]:
    """Returns the perplexity of each seed by rule and part; the best rule without parts comes first."""
    found: dict[str, dict[str, list[float]]] = {}
    for row, _, *values in read_lines(path, str, int, float, float):
        rule, _, part = row.partition("-")
        found.setdefault(rule, {}).setdefault(part, []).append(values[sliding])
    return dict(sorted(found.items(), key=lambda item: next(mean(item[1][part]) for part in PARTS if part in item[1])))


def draw_parts(rules: dict[str, dict[str, list[float]]], label: str) -> Any:
    """Draws a row for each rule and a point for each seed; a line goes from the mean without parts to the mean with all three."""
    figure, [axes] = canvas(0.8 + 0.22 * len(rules))
    for at, parts in enumerate(rules.values()):
        ends = [mean(parts[part]) for part in ("", "parts") if part in parts]
        axes.plot(ends, [at] * len(ends), color="0.6", lw=1.4, zorder=1)
    draw_points(figure, axes, rules, {**PARTS, "": "no parts"})
    axes.set_xlabel(label)
    return figure


def table_of_parts(rules: dict[str, dict[str, list[float]]], head: str) -> str:
    """Returns Markdown with a row for each rule and a column for each part: the mean, ± the deviation of several seeds."""
    drawn = [part for part in PARTS if any(part in parts for parts in rules.values())]
    cells = {f"`{rule}`": [cell(parts.get(part, [])) for part in drawn] for rule, parts in rules.items()}
    return markdown(f"{head}, parts:", [PARTS[part] for part in drawn], cells)


def main() -> None:
    """Draws what the command line asks for."""
    asked = parser(__doc__, ("state", "conversion", "parts"))
    asked.add_argument("--sliding", action="store_true", help="parts: the perplexity with a sliding context")
    args = asked.parse_args()
    if args.figure == "state":
        finish(args, lambda: draw_state(read_table(args.file, "numbers kept", "test perplexity")))
    elif args.figure == "conversion":
        finish(args, lambda: draw_conversion(read_table(args.file, "of the softmax row's performance")))
    else:
        rules = read_parts(args.file, args.sliding)
        label, head = ("test perplexity, sliding", "sliding perplexity") if args.sliding else ("test perplexity",) * 2
        finish(args, lambda: draw_parts(rules, label), lambda: table_of_parts(rules, head))


if __name__ == "__main__":
    main()
