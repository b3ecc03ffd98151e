"""fw-plot recall and tracking: right answers of recipes/synthetic/probe.sh, as figure and as table."""

from __future__ import annotations

from .retrieval import read_results
from .style import canvas, legend, log_lengths, look, plot

SIZES = {"recall": "pairs", "tracking": "elements"}


def title(model: str) -> str:
    """delta_elu-w64 -> delta elu, width 64; delta_product-4-negative -> delta product, 4 writes, negative eigenvalues."""
    name, *endings = model.split("-")
    return ", ".join([name.replace("_", " "), *map(title_of_ending, endings)])


def title_of_ending(ending: str) -> str:
    if ending == "negative":
        return "negative eigenvalues"
    return f"width {ending[1:]}" if ending.startswith("w") else f"{ending} writes"


def draw(args):
    """Draws a line for each model, in the order of the file."""
    lines = read_results(args.results)
    figure, [axes] = canvas(2.2)
    for index, (model, points) in enumerate(lines.items()):
        plot(axes, look(index), title(model), points, clip_on=False)
    log_lengths(axes, (size for points in lines.values() for size in points))
    axes.set(xlabel=SIZES[args.command], ylabel="right answers (%)", ylim=(0, 100))
    legend(figure, axes)
    return figure


def table(args) -> str:
    """Returns Markdown with a row for each model and a column for each size."""
    lines = read_results(args.results)
    sizes = sorted({size for points in lines.values() for size in points})
    found = [f"| right answers, %, of {SIZES[args.command]} | {' | '.join(map(str, sizes))} |", "|---|" + "---:|" * len(sizes)]
    for model, points in lines.items():
        found.append(f"| {title(model)} | " + " | ".join(f"{points[size]:.1f}" if size in points else "" for size in sizes) + " |")
    return "\n".join(found)
