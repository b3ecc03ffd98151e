"""fw-plot: figures of your own training logs.

The ending of --out decides the format of a figure. Lines differ in markers and dashes, so that figures are readable in grey too;
softmax, delta, gated_delta and the others that this package has keep their colours in all figures.
"""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from ..command import check_figure, check_outputs, make_parser, mistakes_as_sentences
from .colours import Look, looks
from .logs import read_logs
from .style import LINE, canvas, label_ends, legend, log_values, plot, save

PROG = "fw-plot"
LONG = 40  # letters, in a name; a longer one would leave the line no place and stands below it
EXAMPLE = "fw-plot curves softmax=runs/softmax/train.log delta=runs/delta/train.log --out curves.svg"
NAMES = {
    "valid_loss": "evaluation loss",
    "valid_ppl": "validation perplexity",
    "train_loss": "training loss of each epoch",
    "train_ppl": "training perplexity of each epoch",
    "loss": "training loss within epochs",
    "ppl": "training perplexity within epochs",
}


def main(arguments: list[str] | None = None) -> None:
    """Draws the figure that the command line asks for."""
    args = build_parser().parse_args(arguments)
    with mistakes_as_sentences(PROG):
        check_outputs([("--out", path) for path in args.out], [("LOG", split(text)[1]) for text in args.logs])
        for path in args.out:
            check_figure("--out", path)
        save(draw_curves(runs(args.logs), args.metric, args.log_axis, args.log_updates), args.out)


def build_parser() -> ArgumentParser:
    """Returns the parser of the command line."""
    parser = make_parser(PROG, __doc__, EXAMPLE)
    commands = parser.add_subparsers(dest="command", required=True)

    what = "a metric of fairseq's logs against updates, one line for each run"
    curves = commands.add_parser("curves", help=what, description=f"{what[0].upper()}{what[1:]}.")
    curves.add_argument("--out", type=Path, nargs="+", required=True, help="files to write, .svg, .pdf or .png")
    said = "logs of fairseq-train or fairseq-hydra-train, JSON or simple; named by their files"
    curves.add_argument("logs", nargs="+", metavar="[NAME=]LOG", help=said)
    curves.add_argument(
        "--metric",
        default="valid_loss",
        help="as in JSON logs: valid_loss or valid_ppl; train_loss or train_ppl, of each epoch; loss or ppl, within epochs."
        " Where a log has less than two epochs, train_loss draws loss for all logs",
    )
    curves.add_argument("--log-axis", action="store_true", help="logarithmic values")
    curves.add_argument("--log-updates", action="store_true", help="logarithmic updates")
    return parser


def draw_curves(lines: list[tuple[str, Look, Path]], metric: str, log_axis: bool = False, log_updates: bool = False) -> Any:
    """Draws a line for each log, with its look, and its name at its end."""
    found, metric = read_logs([path for _, _, path in lines], metric)
    return draw_values([(name, style, values) for (name, style, _), values in zip(lines, found)], metric, log_axis, log_updates)


def draw_values(
    lines: list[tuple[str, Look, dict[int, float]]], metric: str, log_axis: bool = False, log_updates: bool = False
) -> Any:
    """Draws a line for each name, of values by update."""
    figure, [axes] = canvas(max(3.6, 0.7 + 2 * LINE / 72 * len(lines)))
    for name, style, values in lines:
        plot(axes, style, name, values)
    axes.set(xlabel="updates", ylabel=NAMES.get(metric, metric.replace("_", " ")))
    if log_axis:
        log_values(axes)
    if log_updates:
        log_values(axes, "x")
    if max(len(name) for name, *_ in lines) > LONG:
        legend(figure, axes)
    else:
        label_ends(axes)
    return figure


def runs(logs: list[str]) -> list[tuple[str, Look, Path]]:
    """Returns the name, look and file of each line."""
    named = [(name or path.stem, path) for name, path in map(split, logs)]
    styles = looks(name for name, _ in named)
    return [(name, styles[name], path) for name, path in named]


def split(text: str) -> tuple[str, Path]:
    """Returns the name and the file of [NAME=]LOG, where both may have a "=": the file is the longest one that is there."""
    places = [0, *(place + 1 for place, letter in enumerate(text) if letter == "=")]
    start = next((place for place in places if Path(text[place:]).is_file()), places[-1])
    return text[: max(start - 1, 0)], Path(text[start:])


if __name__ == "__main__":
    main()
