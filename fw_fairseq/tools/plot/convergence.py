"""fw-plot converged, translated, length and position: figures of what the recipes of models trained to their end collect."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from ...errors import Mistake
from .retrieval import read_lines
from .style import canvas, cell, draw_points, label_ends, log_lengths, log_values, look, markdown, plot

# How language.sh of recipes/convergence evaluates, in the order of its columns.
WAYS = ("segments", "sliding", "one stream")
# What a line of each recipe's file must be.
CONVERGED, TRANSLATED = "ROW DROPOUT SEED SEGMENTS SLIDING STREAM", "ROW DROPOUT SEED SET BLEU SPLIT"
LENGTH, POSITION = "ROW DROPOUT SEED END STREAM SEGMENTS", "ROW DROPOUT SEED END PERPLEXITY"


def optional(word: str) -> float | None:
    """A number, or "-" for none."""
    return None if word == "-" else float(word)


def without_common_dropout(lines: list[list]) -> list[list]:
    """The row in the first place of each line gets the dropout in the second one into its name, where lines have several."""
    several = len({dropout for _, dropout, *_ in lines}) > 1
    return [[f"{row}, dropout {dropout:g}" if several else row, *others] for row, dropout, *others in lines]


Ways = dict[str, dict[str, list[float]]]  # by row and by way to evaluate, a value of each seed


def by_way(lines: Iterable[tuple[str, str, float | None]], highest_first: bool = False) -> Ways:
    """Sorts the rows by the mean in their first way."""
    found: Ways = {}
    for row, way, value in lines:
        if value is not None:
            found.setdefault(row, {}).setdefault(way, []).append(value)
    return dict(sorted(found.items(), key=lambda item: mean(next(iter(item[1].values()))), reverse=highest_first))


def read_converged(path: Path) -> Ways:
    """Returns the test perplexity."""
    lines = read_lines(path, CONVERGED, str, float, int, float, float, optional)
    return by_way((row, way, value) for row, _, *values in without_common_dropout(lines) for way, value in zip(WAYS, values))


def read_translated(path: Path) -> Ways:
    """Returns the detokenised BLEU of each test set."""
    lines = read_lines(path, TRANSLATED, str, float, int, str, float, float)
    return by_way(((row, name, bleu) for row, _, name, bleu, _ in without_common_dropout(lines)), highest_first=True)


def ways_of(rows: Ways) -> list[str]:
    return list(dict.fromkeys(way for ways in rows.values() for way in ways))


def draw_ways(rows: Ways, label: str):
    """Draws a row for each model, and in it a point for each seed and way to evaluate."""
    figure, [axes] = canvas(0.5 + 0.17 * len(rows))
    draw_points(figure, axes, rows, {way: way for way in ways_of(rows)})
    axes.set_xlabel(label)
    return figure


def table_of_ways(corner: str, rows: Ways) -> str:
    """Returns Markdown with a row for each model and a column for each way."""
    drawn = ways_of(rows)
    return markdown(corner, drawn, {f"`{row}`": [cell(ways.get(way, []), 2) for way in drawn] for row, ways in rows.items()})


def draw_converged(args):
    return draw_ways(read_converged(args.results), "test perplexity")


def table_of_converged(args) -> str:
    return table_of_ways("test perplexity", read_converged(args.results))


def draw_translated(args):
    return draw_ways(read_translated(args.results), "detokenised BLEU")


def table_of_translated(args) -> str:
    return table_of_ways("detokenised BLEU", read_translated(args.results))


Spans = dict[str, dict[int, list[float]]]  # by row and by the last word of a span, a value of each seed


def read_length(path: Path) -> Spans:
    """Returns the perplexity in a stream divided by that in segments."""
    lines = read_lines(path, LENGTH, str, float, int, int, float, float)
    if not all(segments > 0 for *_, segments in lines):
        raise Mistake(f"{path} has a line whose SEGMENTS are not above 0; perplexities are at least 1")
    return spans([*others, stream / segments] for *others, stream, segments in lines)


def read_position(path: Path, relative_to: str | None = None, leave_out: Sequence[str] = ()) -> Spans:
    """Returns the perplexity of the words of all segments at a span of places, or its share of that of the row ``relative_to`` with
    the same dropout and seed."""
    lines = read_lines(path, POSITION, str, float, int, int, float)
    rows = list(dict.fromkeys(row for row, *_ in lines))
    for option, name in [("--relative-to", relative_to)] * bool(relative_to) + [("--leave-out", name) for name in leave_out]:
        if name not in rows:
            raise Mistake(f"{option} is {name}, which is no row of {path}; it has: {', '.join(rows)}")
    lines = [line for line in lines if line[0] not in leave_out or line[0] == relative_to]
    if relative_to:
        whole = {tuple(key): value for row, *key, value in lines if row == relative_to}
        if not all(value > 0 for value in whole.values()):
            raise Mistake(f"{path} has a line of {relative_to} whose perplexity is not above 0; perplexities are at least 1")
        lines = [[row, *key, value / whole[tuple(key)]] for row, *key, value in lines if row != relative_to and tuple(key) in whole]
        drawn = {row for row, *_ in lines}
        if alone := [row for row in rows if row not in (relative_to, *leave_out, *drawn)]:
            said = f"--relative-to is {relative_to}, which has no seed and dropout of {', '.join(alone)} in {path}"
            raise Mistake(f"{said}; give --leave-out {' '.join(alone)}")
    if not lines:
        raise Mistake(f"--leave-out leaves no row of {path} to draw")
    return spans(lines)


def spans(lines: Iterable[list]) -> Spans:
    found: Spans = {}
    for row, _, end, value in without_common_dropout(list(lines)):
        found.setdefault(row, {}).setdefault(end, []).append(value)
    return found


def draw_spans(rows: Spans, ticks: Callable, log_axis: bool = True, **labels):
    """Draws a line for each row: the mean of its seeds. Returns the figure and its axes."""
    figure, [axes] = canvas(2.3, left=0.15 if log_axis else 0.18, right=0.71, top=0.96, bottom=0.17)
    ends = []
    for index, (row, found) in enumerate(rows.items()):
        points = {end: mean(values) for end, values in found.items()}
        plot(axes, look(index), row, points)
        ends.append((row.replace("_", " "), max(points.items()), look(index).color))
    log_lengths(axes, (end for found in rows.values() for end in ticks(list(found))))
    if log_axis:
        log_values(axes)
    axes.set(**labels)
    label_ends(axes, ends)
    return figure, axes


def table_of_spans(corner: str, rows: Spans, digits: int) -> str:
    """Returns Markdown with a row for each row and a column for each span."""
    columns = sorted({end for found in rows.values() for end in found})
    cells = {f"`{row}`": [cell(found.get(end, []), digits) for end in columns] for row, found in rows.items()}
    return markdown(corner, columns, cells)


def draw_length(args):
    rows, every_third = read_length(args.results), slice(None, None, 3)
    figure, axes = draw_spans(rows, lambda ends: ends[every_third], xlabel="words read", ylabel="perplexity, stream / segments")
    mark_one(axes)
    return figure


def mark_one(axes) -> None:
    """Draws the line of a share of 1."""
    axes.axhline(1, color="0.6", lw=0.8, zorder=0)


def table_of_length(args) -> str:
    return table_of_spans("stream / segments, words to", read_length(args.results), 3)


def draw_position(args):
    rows = read_position(args.results, args.relative_to, args.leave_out)
    label = f"test perplexity{over(args)}"
    figure, axes = draw_spans(rows, list, not args.relative_to, xlabel="place in the segment", ylabel=label)
    if args.relative_to:
        mark_one(axes)
    return figure


def over(args) -> str:
    return f" / that of {args.relative_to}" if args.relative_to else ""


def table_of_position(args) -> str:
    rows = read_position(args.results, args.relative_to, args.leave_out)
    return table_of_spans(f"test perplexity{over(args)}, words to", rows, 3 if args.relative_to else 2)


def add_position_options(command) -> None:
    """Adds what ``fw-plot position`` takes beside what all figures take."""
    command.add_argument("--relative-to", metavar="ROW", help="draw shares of this row's perplexity with the same seed and dropout")
    command.add_argument("--leave-out", metavar="ROW", nargs="+", default=[], help="rows that are not drawn")


class Figure(NamedTuple):
    help: str
    recipe: str
    form: str
    draw: Callable
    table: Callable
    add_options: Callable = lambda command: None


FIGURES = {
    "converged": Figure(
        "perplexity of models trained to their end, a point for each seed and evaluation",
        "language.sh",
        CONVERGED,
        draw_converged,
        table_of_converged,
    ),
    "translated": Figure(
        "BLEU of models trained to their end, a point for each seed and test set",
        "translation.sh",
        TRANSLATED,
        draw_translated,
        table_of_translated,
    ),
    "length": Figure(
        "perplexity in one stream, as a share of that in segments, against the words read so far",
        "length.sh",
        LENGTH,
        draw_length,
        table_of_length,
    ),
    "position": Figure(
        "perplexity in segments against the place of a word in its segment",
        "position.sh",
        POSITION,
        draw_position,
        table_of_position,
        add_position_options,
    ),
}
