"""fw-plot state, conversion, parts, converged, length and position: what the recipes of WikiText-2 print and collect."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean, stdev

from ... import Mistake
from ...files import read_text
from .retrieval import read_lines
from .style import SMALL, canvas, label_ends, legend, log_lengths, log_values, look, markdown, plot, spread_out

# The endings of rows in recipes/mixers.sh, in the order of the columns.
PARTS = {"": "none", "conv": "short convolution", "norm": "output norm", "gate": "output gate", "parts": "all three"}
# How language.sh of recipes/convergence evaluates, in the order of its columns.
WAYS = ("segments", "sliding", "one stream")
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
            numbers = [re.match(r"\d[\d.]*", cells[place].replace(",", "")) for place in places[1:]]
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


def draw_points(figure, axes, rows: dict[str, dict[str, list[float]]], labels: dict[str, str]) -> None:
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


def table_of_parts(args) -> str:
    """Returns Markdown with a row for each rule and a column for each part: the mean, ± the deviation of several seeds."""
    rules = read_parts(args.results, args.sliding)
    drawn = [part for part in PARTS if any(part in parts for parts in rules.values())]
    head = "sliding perplexity" if args.sliding else "test perplexity"
    cells = {f"`{rule}`": [cell(parts.get(part, [])) for part in drawn] for rule, parts in rules.items()}
    return markdown(f"{head}, parts:", [PARTS[part] for part in drawn], cells)


def cell(values: list[float], digits: int = 1) -> str:
    spread = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{spread}" if values else ""


def optional(word: str) -> float | None:
    """A number, or "-" for none."""
    return None if word == "-" else float(word)


def without_common_dropout(lines: list[list]) -> list[list]:
    """The row in the first place of each line gets the dropout in the second one into its name, where lines have several."""
    several = len({dropout for _, dropout, *_ in lines}) > 1
    return [[f"{row}, dropout {dropout:g}" if several else row, *others] for row, dropout, *others in lines]


def read_converged(path: Path) -> dict[str, dict[str, list[float]]]:
    """Returns the test perplexity of each seed by row and by way to evaluate; the best row in segments comes first."""
    found: dict[str, dict[str, list[float]]] = {}
    form = "ROW DROPOUT SEED SEGMENTS SLIDING STREAM"
    for row, _, *values in without_common_dropout(read_lines(path, form, str, float, int, float, float, optional)):
        for way, value in zip(WAYS, values):
            if value is not None:
                found.setdefault(row, {}).setdefault(way, []).append(value)
    return dict(sorted(found.items(), key=lambda item: mean(item[1][WAYS[0]])))


def draw_converged(args):
    """Draws a row for each model, and in it a point for each seed and way to evaluate."""
    rows = read_converged(args.results)
    figure, [axes] = canvas(0.5 + 0.17 * len(rows))
    draw_points(figure, axes, rows, dict(zip(WAYS, WAYS)))
    axes.set_xlabel("test perplexity")
    return figure


def table_of_converged(args) -> str:
    """Returns Markdown with a row for each model and a column for each way: the mean, ± the deviation of several seeds."""
    rows = read_converged(args.results)
    drawn = [way for way in WAYS if any(way in ways for ways in rows.values())]
    cells = {f"`{row}`": [cell(ways.get(way, []), 2) for way in drawn] for row, ways in rows.items()}
    return markdown("test perplexity", drawn, cells)


Spans = dict[str, dict[int, list[float]]]  # by row and by the last word of a span, a value of each seed


def read_length(path: Path) -> Spans:
    """Returns the perplexity in a stream divided by that in segments."""
    lines = read_lines(path, "ROW DROPOUT SEED END STREAM SEGMENTS", str, float, int, int, float, float)
    return spans([*others, stream / segments] for *others, stream, segments in lines)


def read_position(path: Path) -> Spans:
    """Returns the perplexity of the words of all segments at a span of places."""
    return spans(read_lines(path, "ROW DROPOUT SEED END PERPLEXITY", str, float, int, int, float))


def spans(lines: Iterable[list]) -> Spans:
    found: Spans = {}
    for row, _, end, value in without_common_dropout(list(lines)):
        found.setdefault(row, {}).setdefault(end, []).append(value)
    return found


def draw_spans(rows: Spans, ticks: Callable, **labels):
    """Draws a line for each row: the mean of its seeds. Returns the figure and its axes."""
    figure, [axes] = canvas(2.3, left=0.15, right=0.71, top=0.96, bottom=0.17)
    ends = []
    for index, (row, found) in enumerate(rows.items()):
        points = {end: mean(values) for end, values in found.items()}
        plot(axes, look(index), row, points)
        ends.append((row.replace("_", " "), max(points.items()), look(index).color))
    log_lengths(axes, (end for found in rows.values() for end in ticks(list(found))))
    log_values(axes)
    axes.set(**labels)
    label_ends(axes, ends)
    return figure, axes


def table_of_spans(corner: str, rows: Spans, digits: int) -> str:
    """Returns Markdown with a row for each row and a column for each span: the mean, ± the deviation of several seeds."""
    columns = sorted({end for found in rows.values() for end in found})
    cells = {f"`{row}`": [cell(found.get(end, []), digits) for end in columns] for row, found in rows.items()}
    return markdown(corner, columns, cells)


def draw_length(args):
    rows, every_third = read_length(args.results), slice(None, None, 3)
    figure, axes = draw_spans(rows, lambda ends: ends[every_third], xlabel="words read", ylabel="perplexity, stream / segments")
    axes.axhline(1, color="0.6", lw=0.8, zorder=0)
    return figure


def table_of_length(args) -> str:
    return table_of_spans("stream / segments, words to", read_length(args.results), 3)


def draw_position(args):
    figure, _ = draw_spans(read_position(args.results), list, xlabel="place in the segment", ylabel="test perplexity")
    return figure


def table_of_position(args) -> str:
    return table_of_spans("test perplexity, words to", read_position(args.results), 2)
