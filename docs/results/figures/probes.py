"""The share of right answers of recipes/synthetic/probe.sh against the number of pairs (recall) or of elements (tracking)."""

from __future__ import annotations

from typing import Any

from lines import finish, markdown, parser, read_results

from fw_fairseq.tools.plot.colours import looks
from fw_fairseq.tools.plot.style import LINE, canvas, label_ends, log_lengths, plot

SIZES = {"recall": "pairs", "tracking": "elements"}
Lines = dict[str, dict[int, float]]


def title(model: str) -> str:
    """delta_elu-w64 -> delta elu, width 64; delta_product-4-negative -> delta product, 4 writes, negative eigenvalues."""
    name, *endings = model.split("-")
    return ", ".join([name.replace("_", " "), *map(title_of_ending, endings)])


def title_of_ending(ending: str) -> str:
    """w64 -> width 64; 4 -> 4 writes."""
    if ending == "negative":
        return "negative eigenvalues"
    return f"width {ending[1:]}" if ending.startswith("w") else f"{ending} writes"


def panels_of(lines: Lines) -> dict[str, Lines]:
    """Returns the lines of each panel by its title: one for each width where all models name theirs, and one for models with and
    one for models without negative eigenvalues where there are both."""
    endings = {model: model.split("-")[1:] for model in lines}
    widths = {model: int(ending[1:]) for model, found in endings.items() for ending in found if ending.startswith("w")}
    by_width, by_sign = len(widths) == len(lines), len({"negative" in found for found in endings.values()}) == 2
    found: dict[tuple[int, str], Lines] = {}
    for model, points in lines.items():
        taken = [e for e in endings[model] if (by_width and e.startswith("w")) or (by_sign and e == "negative")]
        at = [title_of_ending(ending) for ending in taken]
        if by_sign and "negative" not in taken:
            at.append("without negative eigenvalues")
        rest = "-".join([model.split("-")[0], *(ending for ending in endings[model] if ending not in taken)])
        found.setdefault((widths.get(model, 0) * by_width, ", ".join(at)), {})[rest] = points
    return {title: found[width, title] for width, title in sorted(found, key=lambda key: key[0])}


def draw(lines: Lines, sizes: str) -> Any:
    """Draws a line for each model, in the order of the file."""
    panels = panels_of(lines)
    names = list(dict.fromkeys(name for models in panels.values() for name in models))
    figure, row = canvas(max(3.0, 0.9 + LINE / 72 * len(names)), len(panels), beside=True)
    styles = looks(names)
    for axes, (heading, models) in zip(row, panels.items()):
        for model, points in models.items():
            plot(axes, styles[model], title(model), points, clip_on=False)
        axes.set(xlabel=sizes, ylim=(0, 100), title=heading)
        log_lengths(axes, (size for points in lines.values() for size in points))
        axes.tick_params(labelleft=axes is row[0])
    row[0].set_ylabel("right answers (%)")
    label_ends(*row)
    return figure


def table(lines: Lines, sizes: str, columns: list[int] | None = None) -> str:
    """Returns Markdown with a row for each model and a column for each size, or for ``columns``."""
    columns = columns or sorted({size for points in lines.values() for size in points})
    cells = {title(model): [f"{points[at]:.1f}" if at in points else "" for at in columns] for model, points in lines.items()}
    return markdown(f"right answers, %, of {sizes}", columns, cells)


if __name__ == "__main__":
    asked = parser(__doc__, SIZES)
    asked.add_argument("--columns", type=int, metavar="SIZE", nargs="+", help="of the table, in place of all sizes")
    args = asked.parse_args()
    results, what = read_results(args.file), SIZES[args.figure]
    finish(args, lambda: draw(results, what), lambda: table(results, what, args.columns))
