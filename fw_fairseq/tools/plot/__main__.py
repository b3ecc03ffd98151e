"""fw-plot: the papers' figures and tables from logs and reports. Figures by the ending of --out; readable in grey too."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ... import Mistake
from . import cost as plot_cost
from . import published as tables
from . import retrieval as plot_retrieval
from .logs import read_log
from .style import Look, canvas, legend, log_values, look, plot, save
from .wikitext2 import draw_conversion, draw_state

NAMES = {"valid_loss": "evaluation loss", "valid_ppl": "validation perplexity", "ppl": "training perplexity"}


def main(arguments: list[str] | None = None) -> None:
    args = build_parser().parse_args(arguments)
    try:
        if args.command == "tables":
            return tables.main(args)
        if getattr(args, "table", False):
            print(plot_retrieval.table(args))
        elif not args.out:
            raise Mistake("--out is missing: the files to write, .svg, .pdf or .png")
        if args.out:
            check_endings(args.out)
            save(args.draw(args), args.out)
    except (OSError, ValueError) as error:
        sys.exit(f"fw-plot: error: {error}")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fw-plot", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, draw, help_: str):
        command = commands.add_parser(name, help=help_, description=help_[0].upper() + help_[1:] + ".")
        command.set_defaults(draw=draw)
        command.add_argument("--out", type=Path, nargs="+", default=[], help="files to write, .svg, .pdf or .png")
        return command

    for name, what in (("capacity", "without replacement, linear axis"), ("updates", "with replacement, logarithmic axis")):
        command = add(name, plot_retrieval.draw, f"evaluation loss of associative retrieval against the number of keys, {what}")
        command.add_argument("results", type=Path, help="what recipes/synthetic/sweep.sh wrote: lines of MODEL KEYS LOSS")
        command.add_argument("--published", action="store_true", help="the published values beside")
        command.add_argument("--table", action="store_true", help="print the same as Markdown; --out may then be left out")
    curves = add("curves", draw_curves, "a metric of fairseq's logs against updates, one line for each run")
    curves.add_argument("logs", nargs="+", metavar="[NAME=]LOG", help="logs of fairseq-train, JSON or simple; named by their files")
    curves.add_argument(
        "--metric", default="valid_loss", help="as in JSON logs: valid_loss, valid_ppl, train_loss; ppl: of train_inner"
    )
    curves.add_argument("--log-axis", action="store_true", help="logarithmic values")
    curves.add_argument("--log-updates", action="store_true", help="logarithmic updates")
    for name, what in plot_cost.FIGURES.items():
        command = add(name, plot_cost.draw, what.help)
        command.add_argument("report", type=Path, help="what fw-bench model --json wrote")
    state = add("state", draw_state, "perplexity against the size of the state, one point for each model")
    state.add_argument("page", type=Path, help="the table that recipes/wikitext2/table.sh printed, or a page that holds it")
    conversion = add("conversion", draw_conversion, "what is left of a Transformer's performance after conversion, against m")
    conversion.add_argument(
        "page", type=Path, help="the table that recipes/wikitext2/conversion.sh printed, or a page that holds it"
    )
    tables.add_arguments(
        commands.add_parser("tables", help="finished runs of recipes in the papers' tables, beside what was published")
    )
    return parser


def check_endings(paths: list[Path]) -> None:
    for path in paths:
        if path.suffix not in (".svg", ".pdf", ".png"):
            raise Mistake(f"--out is {path}; it must end in .svg, .pdf or .png")


def draw_curves(args):
    figure, [axes] = canvas(2.2)
    for name, style, path in runs(args.logs):
        plot(axes, style, name, read_log(path, args.metric))
    label = NAMES.get(args.metric, args.metric.replace("_", " "))
    axes.set(xlabel="updates", ylabel=label)
    if args.log_axis:
        log_values(axes)
    if args.log_updates:
        log_values(axes, "x")
    legend(figure, axes)
    return figure


def runs(logs: list[str]) -> list[tuple[str, Look, Path]]:
    """Name, line and file of each; logs of retrieval as in its other figures."""
    named = [(name, Path(path)) for name, _, path in (text.rpartition("=") for text in logs)]
    points = {plot_retrieval.point_of_log(path): path for name, path in named if not name}
    if None not in points and len(points) == len(named) and len({figure for figure, _ in points}) == 1:
        drawn = sorted(points, key=lambda point: plot_retrieval.rank(*point))
        return [
            (plot_retrieval.title(model), plot_retrieval.look_of(figure, model), points[figure, model]) for figure, model in drawn
        ]
    return [(name or path.stem, look(index), path) for index, (name, path) in enumerate(named)]


if __name__ == "__main__":
    main()
