"""Figures of recipes/convergence. converged: perplexity, a point for each seed and evaluation, of language.sh. translated: BLEU, a
point for each seed and test set, of translation.sh. length: perplexity in one stream, as a share of that in segments, against the
words read, of length.sh. position: perplexity against the place of a word in its segment, of position.sh. curves: validation
perplexity against updates, of what language.sh, conversion.sh and translation.sh collect."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any

from lines import cell, draw_points, finish, markdown, parser, read_lines

from fw_fairseq.tools.plot.__main__ import draw_values
from fw_fairseq.tools.plot.colours import looks
from fw_fairseq.tools.plot.style import canvas, label_ends, log_lengths, log_values, plot

EVALUATIONS = ("segments", "sliding", "one stream")  # of language.sh, in the order of its columns
LABELS = {"converged": "test perplexity", "translated": "detokenised BLEU"}
Points = dict[str, dict[str, list[float]]]  # by row and by evaluation or test set, a value of each seed
Spans = dict[str, dict[int, list[float]]]  # by row and by the last word of a span, a value of each seed


def name_dropouts(lines: list[list]) -> list[list]:
    """The row in the first place of each line gets the dropout in the second one into its name, where lines have several."""
    several = len({dropout for _, dropout, *_ in lines}) > 1
    return [[f"{row}, dropout {dropout:g}" if several else row, *others] for row, dropout, *others in lines]


def grouped(lines: Iterable[tuple], highest_first: bool = False) -> Points:
    """Sorts the rows by the mean in their first column."""
    found: Points = {}
    for row, column, value in lines:
        if value != "-":
            found.setdefault(row, {}).setdefault(column, []).append(float(value))
    return dict(sorted(found.items(), key=lambda item: mean(next(iter(item[1].values()))), reverse=highest_first))


def read_converged(path: Path) -> Points:
    """Returns the test perplexity of lines of ROW DROPOUT SEED SEGMENTS SLIDING STREAM."""
    lines = name_dropouts(read_lines(path, str, float, int, str, str, str))
    return grouped((row, name, value) for row, _, *values in lines for name, value in zip(EVALUATIONS, values))


def read_translated(path: Path) -> Points:
    """Returns the detokenised BLEU of lines of ROW DROPOUT SEED SET BLEU SPLIT."""
    lines = name_dropouts(read_lines(path, str, float, int, str, float, float))
    return grouped(((row, name, bleu) for row, _, name, bleu, _ in lines), highest_first=True)


def columns_of(rows: Points) -> list[str]:
    """Returns what rows have values of."""
    return list(dict.fromkeys(column for found in rows.values() for column in found))


def draw_rows(rows: Points, label: str) -> Any:
    """Draws a row for each model, and in it a point for each value."""
    figure, [axes] = canvas(0.8 + 0.22 * len(rows))
    columns = columns_of(rows)
    draw_points(figure, axes, rows, {column: column for column in columns})
    axes.set_xlabel(label if len(columns) > 1 else f"{label}, {columns[0]}")
    return figure


def table_of_rows(rows: Points, corner: str) -> str:
    """Returns Markdown with a row for each model and a column for each evaluation."""
    columns = columns_of(rows)
    return markdown(corner, columns, {f"`{row}`": [cell(found.get(at, []), 2) for at in columns] for row, found in rows.items()})


def read_length(path: Path) -> Spans:
    """Returns the perplexity in a stream divided by that in segments, of lines of ROW DROPOUT SEED END STREAM SEGMENTS."""
    lines = read_lines(path, str, float, int, int, float, float)
    return spans([*others, stream / segments] for *others, stream, segments in lines)


def read_position(path: Path, relative_to: str | None = None, leave_out: Iterable[str] = ()) -> Spans:
    """Returns the perplexity of lines of ROW DROPOUT SEED END PERPLEXITY, or its share of that of the row ``relative_to`` with the
    same dropout and seed."""
    lines = read_lines(path, str, float, int, int, float)
    whole = {tuple(key): value for row, *key, value in lines if row == relative_to}
    lines = [line for line in lines if line[0] not in leave_out]
    if relative_to:
        shared = [line for line in lines if line[0] != relative_to and tuple(line[1:-1]) in whole]
        lines = [[row, *key, value / whole[tuple(key)]] for row, *key, value in shared]
    return spans(lines)


def read_curves(path: Path, seed: int, rows: Iterable[str]) -> dict[str, dict[int, float]]:
    """Returns the perplexity by update of each row, of lines of ROW DROPOUT SEED EPOCH UPDATES LOSS PERPLEXITY."""
    lines = [line for line in read_lines(path, str, float, int, int, int, float, float) if line[2] == seed]
    names = [*(rows or dict.fromkeys(row for row, *_ in lines))]
    found: dict[str, dict[int, float]] = {}
    for name in names:
        for row, _, _, updates, _, perplexity in name_dropouts([line for line in lines if line[0] == name]):
            found.setdefault(row, {})[updates] = perplexity
    return found


def spans(lines: Iterable[list]) -> Spans:
    """Returns the values of seeds by row and span."""
    found: Spans = {}
    for row, _, end, value in name_dropouts(list(lines)):
        found.setdefault(row, {}).setdefault(end, []).append(value)
    return found


def draw_spans(rows: Spans, ticks: Callable, log_axis: bool, share: bool, **labels: str) -> Any:
    """Draws a line for each row: the mean of its seeds; and a line of 1 if these are shares."""
    figure, [axes] = canvas()
    for row, style in looks(rows).items():
        plot(axes, style, row.replace("_", " "), {end: mean(values) for end, values in rows[row].items()})
    log_lengths(axes, (end for found in rows.values() for end in ticks(list(found))))
    if log_axis:
        log_values(axes)
    axes.set(**labels)
    if share:
        axes.axhline(1, color="0.6", lw=1, zorder=0)
    label_ends(axes)
    return figure


def table_of_spans(rows: Spans, corner: str, digits: int) -> str:
    """Returns Markdown with a row for each row and a column for each span."""
    columns = sorted({end for found in rows.values() for end in found})
    cells = {f"`{row}`": [cell(found.get(end, []), digits) for end in columns] for row, found in rows.items()}
    return markdown(corner, columns, cells)


def main() -> None:
    """Draws what the command line asks for."""
    asked = parser(__doc__, (*LABELS, "length", "position", "curves"))
    asked.add_argument(
        "--relative-to", metavar="ROW", help="position: shares of this row's perplexity with the same seed and dropout"
    )
    asked.add_argument("--leave-out", metavar="ROW", nargs="+", default=[], help="position: rows that are not drawn")
    asked.add_argument(
        "--rows", metavar="ROW", nargs="+", default=[], help="curves: rows in the order of the legend, in place of all"
    )
    asked.add_argument("--seed", type=int, default=2, help="curves: of the seed (2)")
    args = asked.parse_args()
    if args.figure == "curves":
        curves = read_curves(args.file, args.seed, args.rows)
        lines = [(row, style, curves[row]) for row, style in looks(curves).items()]
        return finish(args, lambda: draw_values(lines, "valid_ppl", log_axis=True))
    if args.figure in LABELS:
        rows, label = (read_converged if args.figure == "converged" else read_translated)(args.file), LABELS[args.figure]
        return finish(args, lambda: draw_rows(rows, label), lambda: table_of_rows(rows, label))
    if args.figure == "length":
        found, label, place, corner, share, ticks = (
            read_length(args.file),
            "perplexity, stream / segments",
            "words read",
            "",
            True,
            3,
        )
        corner = "stream / segments"
    else:
        found, share, ticks = read_position(args.file, args.relative_to, args.leave_out), bool(args.relative_to), 1
        corner = label = "test perplexity" + (f" / that of {args.relative_to}" if share else "")
        place = "place in the segment"
    log_axis = args.figure == "length" or not share
    finish(
        args,
        lambda: draw_spans(found, lambda ends: ends[::ticks], log_axis, share, xlabel=place, ylabel=label),
        lambda: table_of_spans(found, f"{corner}, words to", 3 if share else 2),
    )


if __name__ == "__main__":
    main()
