"""fw-plot recall and tracking: right answers of recipes/synthetic/probe.sh, as figure and as table."""

from __future__ import annotations

from .retrieval import read_results
from .style import SMALL, canvas, legend, log_lengths, look, markdown, plot

SIZES = {"recall": "pairs", "tracking": "elements"}


def title(model: str) -> str:
    """delta_elu-w64 -> delta elu, width 64; delta_product-4-negative -> delta product, 4 writes, negative eigenvalues."""
    name, *endings = model.split("-")
    return ", ".join([name.replace("_", " "), *map(title_of_ending, endings)])


def title_of_ending(ending: str) -> str:
    if ending == "negative":
        return "negative eigenvalues"
    return f"width {ending[1:]}" if is_width(ending) else f"{ending} writes"


def is_width(ending: str) -> bool:
    return ending.startswith("w") and ending[1:].isdecimal()


def panels_of(lines: dict[str, dict]) -> dict[str, dict[str, dict]]:
    """Returns the lines of each panel by its title: one for each width where all models name theirs, and one for models with and
    one for models without negative eigenvalues where there are both."""
    endings = {model: model.split("-")[1:] for model in lines}
    widths = {model: int(ending[1:]) for model, found in endings.items() for ending in found if is_width(ending)}
    by_width, by_sign = len(widths) == len(lines), len({"negative" in found for found in endings.values()}) == 2
    found: dict = {}
    for model, points in lines.items():
        taken = [e for e in endings[model] if (by_width and is_width(e)) or (by_sign and e == "negative")]
        at = [title_of_ending(ending) for ending in taken]
        if by_sign and "negative" not in taken:
            at.append("without negative eigenvalues")
        rest = "-".join([model.split("-")[0], *(ending for ending in endings[model] if ending not in taken)])
        found.setdefault((widths.get(model, 0) * by_width, ", ".join(at)), {})[rest] = points
    return {title: found[width, title] for width, title in sorted(found, key=lambda key: key[0])}


def draw(args):
    """Draws a line for each model, in the order of the file."""
    lines = read_results(args.results)
    panels = panels_of(lines)
    names = list(dict.fromkeys(name for models in panels.values() for name in models))
    figure, rows = canvas(2.2 if len(panels) == 1 else 0.5 + 1.3 * len(panels), len(panels))
    for axes, (heading, models) in zip(rows, panels.items()):
        for model, points in models.items():
            plot(axes, look(names.index(model)), title(model), points, clip_on=False)
        axes.set(ylabel="right answers (%)", ylim=(0, 100))
        axes.set_title(heading, loc="left", fontsize=SMALL)
    log_lengths(axes, (size for points in lines.values() for size in points))
    axes.set_xlabel(SIZES[args.command])
    legend(figure, max(rows, key=lambda axes: len(axes.lines)))
    return figure


def table(args) -> str:
    """Returns Markdown with a row for each model and a column for each size."""
    lines = read_results(args.results)
    sizes = sorted({size for points in lines.values() for size in points})
    cells = {title(model): [f"{points[size]:.1f}" if size in points else "" for size in sizes] for model, points in lines.items()}
    return markdown(f"right answers, %, of {SIZES[args.command]}", sizes, cells)
