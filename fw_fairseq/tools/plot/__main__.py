"""fw-plot: the papers' figures and tables from logs and reports.

The ending of --out decides the format of a figure. Lines differ in markers and dashes, so that figures are readable in grey too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...errors import Mistake
from ..command import check_outputs, make_parser, mistakes_as_sentences, refuse_folder
from . import convergence, cost, dpfp, probes, retrieval, tables
from .logs import read_logs
from .style import Look, canvas, legend, log_values, look, plot, save
from .wikitext2 import draw_conversion, draw_parts, draw_state, table_of_parts

PROG = "fw-plot"
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
    args = build_parser().parse_args(arguments)
    with mistakes_as_sentences(PROG):
        run(args)


def run(args) -> None:
    if args.command == "tables":
        return tables.main(args)
    check_endings(args.out)
    check_outputs([("--out", path) for path in args.out], inputs(args))
    if getattr(args, "table", False):
        print(args.table_of(args))
    elif not args.out:
        raise Mistake("--out is missing: the files to write, .svg, .pdf or .png")
    if args.out:
        save(args.draw(args), args.out)


def build_parser():
    parser = make_parser(PROG, __doc__, EXAMPLE)
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, draw, help_: str):
        command = commands.add_parser(name, help=help_, description=help_[0].upper() + help_[1:] + ".")
        command.set_defaults(draw=draw)
        command.add_argument("--out", type=Path, nargs="+", default=[], help="files to write, .svg, .pdf or .png")
        return command

    for name, what in (("capacity", "without replacement, linear axis"), ("updates", "with replacement, logarithmic axis")):
        command = add(name, retrieval.draw, f"evaluation loss of associative retrieval against the number of keys, {what}")
        command.add_argument("results", type=Path, help="the file of recipes/synthetic/sweep.sh: lines of MODEL KEYS LOSS")
        command.add_argument("--published", action="store_true", help="draw the published values too")
        add_table(command, retrieval.table)
    for name, what in (("recall", "pairs to be recalled"), ("tracking", "elements of a product, which is asked for at each")):
        command = add(name, probes.draw, f"the share of right answers against the number of {what}")
        command.add_argument("results", type=Path, help="a file of recipes/synthetic/probe.sh: lines of MODEL SIZE PERCENT")
        add_table(command, probes.table)
    curves = add("curves", draw_curves, "a metric of fairseq's logs against updates, one line for each run")
    curves.add_argument(
        "logs",
        nargs="+",
        metavar="[NAME=]LOG",
        help="logs of fairseq-train or fairseq-hydra-train, JSON or simple; named by their files",
    )
    curves.add_argument(
        "--metric",
        default="valid_loss",
        help="as in JSON logs: valid_loss or valid_ppl; train_loss or train_ppl, of each epoch; loss or ppl, within epochs."
        " Where a log has less than two epochs, train_loss draws loss for all logs",
    )
    curves.add_argument("--log-axis", action="store_true", help="logarithmic values")
    curves.add_argument("--log-updates", action="store_true", help="logarithmic updates")
    for name, what in cost.FIGURES.items():
        command = add(name, cost.draw, what.help)
        command.add_argument("report", type=Path, help="the file of fw-bench model --json")
    state = add("state", draw_state, "perplexity against the size of the state, one point for each model")
    state.add_argument("page", type=Path, help="the table that recipes/wikitext2/table.sh printed, or a page that holds it")
    command = add("parts", draw_parts, "perplexity of rules with and without the parts around them, a point for each seed")
    command.add_argument("results", type=Path, help="a file of recipes/wikitext2/table.sh: lines of ROW SEED PERPLEXITY SLIDING")
    command.add_argument("--sliding", action="store_true", help="the perplexity with a sliding context")
    add_table(command, table_of_parts)
    for name, figure in convergence.FIGURES.items():
        command = add(name, figure.draw, figure.help)
        command.add_argument("results", type=Path, help=f"a file of recipes/convergence/{figure.recipe}: lines of {figure.form}")
        add_table(command, figure.table)
        figure.add_options(command)
    conversion = add("conversion", draw_conversion, "the share of a Transformer's performance that a conversion keeps, against m")
    conversion.add_argument(
        "page", type=Path, help="the table that recipes/wikitext2/conversion.sh printed, or a page that holds it"
    )
    add("dpfp", dpfp.draw, "the four features of DPFP with nu = 1 over the plane, as surfaces")
    tables.add_arguments(
        commands.add_parser("tables", help="finished runs of recipes in the papers' tables, beside published values")
    )
    return parser


def add_table(command, table: Callable) -> None:
    """Adds --table, which prints what ``table`` returns."""
    command.add_argument("--table", action="store_true", help="print the values as Markdown; --out may then be left out")
    command.set_defaults(table_of=table)


def inputs(args) -> list[tuple[str, Path]]:
    """Returns the files that a figure is drawn of, with the names of their arguments."""
    files = {name.upper(): getattr(args, name) for name in ("results", "report", "page") if hasattr(args, name)}
    return [*files.items(), *(("LOG", split(text)[1]) for text in getattr(args, "logs", []))]


def check_endings(paths: list[Path]) -> None:
    for path in paths:
        if path.suffix not in (".svg", ".pdf", ".png"):
            raise Mistake(f"--out is {path}; it must end in .svg, .pdf or .png")
        refuse_folder("--out", path)


def draw_curves(args):
    """Draws a line for each log."""
    figure, [axes] = canvas(2.2)
    lines = runs(args.logs)
    found, metric = read_logs([path for _, _, path in lines], args.metric)
    for (name, style, _), values in zip(lines, found):
        plot(axes, style, name, values)
    axes.set(xlabel="updates", ylabel=NAMES.get(metric, metric.replace("_", " ")))
    if args.log_axis:
        log_values(axes)
    if args.log_updates:
        log_values(axes, "x")
    legend(figure, axes)
    return figure


def split(text: str) -> tuple[str, Path]:
    """Returns the name and the file of [NAME=]LOG, where both may have a "=": the file is the longest one that is there."""
    places = [0, *(place + 1 for place, letter in enumerate(text) if letter == "=")]
    start = next((place for place in places if Path(text[place:]).is_file()), places[-1])
    return text[: max(start - 1, 0)], Path(text[start:])


def runs(logs: list[str]) -> list[tuple[str, Look, Path]]:
    """Returns the name, look and file of each line; logs of retrieval look as in its other figures."""
    named = [split(text) for text in logs]
    points = {retrieval.point_of_log(path): path for name, path in named if not name}
    if None not in points and len(points) == len(named) and len({figure for figure, _ in points}) == 1:
        drawn = sorted(points, key=lambda point: retrieval.rank(*point))
        return [(retrieval.title(model), retrieval.look_of(figure, model), points[figure, model]) for figure, model in drawn]
    return [(name or path.stem, look(index), path) for index, (name, path) in enumerate(named)]


if __name__ == "__main__":
    main()
