"""fw-plot state, conversion and parts: figures of what the recipes of WikiText-2 print and collect."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import mean

from ...errors import Mistake
from ...files import read_text
from .retrieval import read_lines
from .style import SMALL, canvas, cell, draw_points, label_ends, log_lengths, look, markdown, plot, spread_out

# The endings of rows in recipes/mixers.sh, in the order of the columns.
PARTS = {"": "none", "conv": "short convolution", "norm": "output norm", "gate": "output gate", "parts": "all three"}
RULES, SOFTMAX = ("sum", "gated", "delta", "decay", "gated_delta"), "softmax"


def read_table(path: Path, *columns: str) -> dict[str, tuple[float, ...]]:
    """Returns the numbers in the columns that begin with these words, by row, of the first table that has them."""
    places: list[int] = []
    found: dict[str, tuple[float, ...]] = {}
    for line in read_text(path, "a page with a table").splitlines():
        cells = [cell.strip(" `*") for cell in line.split("|")[1:-1]]
        if not places:
            at = [[i for i, cell in enumerate(cells) if cell.startswith(words)] for words in ("row", *columns)]
            places = [found[0] for found in at] if all(at) else []
        elif not cells:
            break
        else:
            given = [cells[place].replace(",", "") if place < len(cells) else "" for place in places]
            numbers = [re.match(r"\d+(\.\d+)?(e[+-]?\d+)?(?![\w.])", number) for number in given[1:]]
            if all(numbers):
                found[cells[places[0]]] = tuple(float(number[0]) for number in numbers)
    if not found:
        raise Mistake(f"{path} has no table with the columns row, {', '.join(columns)}")
    return found


def draw_state(args):
    """Draws a point for each model, with its name beside it."""
    rows = read_table(args.page, "numbers kept", "test perplexity")
    figure, [axes] = canvas(2.7)
    for name, point in rows.items():
        axes.plot(*point, ls="", ms=4.2, marker=kind(name).marker, color=kind(name).color)
    sizes = sorted(size for size, _ in rows.values())
    axes.set(xscale="log", xlabel="numbers kept of a text", ylabel="test perplexity", xlim=(sizes[0] / 6, sizes[-1] * 12))
    figure.draw_without_rendering()
    low, high = axes.get_ylim()
    gap = (high - low) * 1.2 * SMALL / (72 * axes.get_window_extent().height / figure.dpi)
    for left in (True, False):
        side = {name: point for name, point in rows.items() if (point[0] < sizes[len(sizes) // 2]) == left}
        for (name, (size, perplexity)), at in zip(side.items(), spread_out([y for _, y in side.values()], gap)):
            colour = kind(name).color
            leader = {"arrowstyle": "-", "lw": 0.4, "color": colour, "relpos": (left, 0.5), "shrinkA": 0.5, "shrinkB": 2}
            axes.annotate(
                name.replace("_", " "), (size, perplexity), (size / 1.5 if left else size * 1.5, at), va="center",
                ha="right" if left else "left", fontsize=SMALL, color=colour, arrowprops=leader,
            )  # fmt: skip
    return figure


def kind(name: str):
    return look(0 if name == SOFTMAX else 1 if name.startswith(RULES) else 2)


def draw_conversion(args):
    """Draws a line for each rule and variant, from rows named RULE-M and RULE-M-VARIANT; softmax attention is 100%."""
    lines: dict[str, dict[int, float]] = {}
    for row, (share,) in read_table(args.page, "of the softmax row's performance").items():
        if found := re.fullmatch(r"([a-z_]+)-(\d+)(-[a-z]+)?", row):
            rule, m, otherwise = found.groups()
            lines.setdefault(rule.replace("_", " ") + (otherwise or "").replace("-", ", "), {})[int(m)] = share
    if not lines:
        raise Mistake(f"{args.page} has no row such as decay-16")
    figure, [axes] = canvas(2.3, left=0.14, right=0.71, top=0.96, bottom=0.17)
    ends = []
    for index, (name, points) in enumerate(lines.items(), 1):
        plot(axes, look(index), name, points)
        ends.append((name, max(points.items()), look(index).color))
    axes.set(xlabel="m, features a head", ylabel="% of softmax performance")
    log_lengths(axes, (m for points in lines.values() for m in points))
    label_ends(axes, ends)
    return figure


def read_parts(path: Path, sliding: bool) -> dict[str, dict[str, list[float]]]:
    """Returns the perplexity of each seed by rule and part; the best rule without parts comes first."""
    found: dict[str, dict[str, list[float]]] = {}
    lines = read_lines(path, "ROW SEED PERPLEXITY SLIDING", str, int, float, float)
    for number, (row, _, *values) in enumerate(lines, 1):
        rule, _, part = row.partition("-")
        if part not in PARTS:
            raise Mistake(f"{path}, line {number} has the row {row}; its ending must be {', '.join(filter(None, PARTS))} or none")
        found.setdefault(rule, {}).setdefault(part, []).append(values[sliding])
    return dict(sorted(found.items(), key=lambda item: next(mean(item[1][part]) for part in PARTS if part in item[1])))


def draw_parts(args):
    """Draws a row for each rule and a point for each seed; a line goes from the mean without parts to the mean with all three."""
    rules = read_parts(args.results, args.sliding)
    figure, [axes] = canvas(0.5 + 0.17 * len(rules))
    for at, parts in enumerate(rules.values()):
        ends = [mean(parts[part]) for part in ("", "parts") if part in parts]
        axes.plot(ends, [at] * len(ends), color="0.6", lw=1, zorder=1)
    draw_points(figure, axes, rules, PARTS | {"": "no parts"})
    axes.set_xlabel("test perplexity" + (", sliding" if args.sliding else ""))
    return figure


def table_of_parts(args) -> str:
    """Returns Markdown with a row for each rule and a column for each part: the mean, ± the deviation of several seeds."""
    rules = read_parts(args.results, args.sliding)
    drawn = [part for part in PARTS if any(part in parts for parts in rules.values())]
    head = "sliding perplexity" if args.sliding else "test perplexity"
    cells = {f"`{rule}`": [cell(parts.get(part, [])) for part in drawn] for rule, parts in rules.items()}
    return markdown(f"{head}, parts:", [PARTS[part] for part in drawn], cells)
