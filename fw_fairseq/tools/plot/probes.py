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


def panels_of(lines: dict[str, dict]) -> dict[str, dict[str, dict]]:
    """Returns the lines of each panel by its title: one for each width where all models have one, with or without negative
    eigenvalues, else one for all."""
    found = {}
    for model, points in lines.items():
        name, *endings = model.split("-")
        width = [ending for ending in endings if ending.startswith("w")]
        rest = "-".join([name, *(ending for ending in endings if ending not in width)])
        found.setdefault("".join(map(title_of_ending, width)), {})[rest] = points
    return {"": lines} if "" in found else dict(sorted(found.items(), key=lambda panel: int(panel[0].split()[-1])))


def draw(args):
    """Draws a line for each model, in the order of the file; in a panel for each width where all models have one."""
    lines = read_results(args.results)
    panels = panels_of(lines)
    names = list(dict.fromkeys(name for models in panels.values() for name in models))
    figure, rows = canvas(2.2 if len(panels) == 1 else 0.5 + 1.15 * len(panels), len(panels))
    for axes, (width, models) in zip(rows, panels.items()):
        for model, points in models.items():
            plot(axes, look(names.index(model)), title(model), points, clip_on=False)
        axes.set(ylabel="right answers (%)" if not width else f"{width}\nright answers (%)", ylim=(0, 100))
    log_lengths(axes, (size for points in lines.values() for size in points))
    axes.set_xlabel(SIZES[args.command])
    legend(figure, max(rows, key=lambda axes: len(axes.lines)))
    return figure


def table(args) -> str:
    """Returns Markdown with a row for each model and a column for each size."""
    lines = read_results(args.results)
    sizes = sorted({size for points in lines.values() for size in points})
    found = [f"| right answers, %, of {SIZES[args.command]} | {' | '.join(map(str, sizes))} |", "|---|" + "---:|" * len(sizes)]
    for model, points in lines.items():
        found.append(f"| {title(model)} | " + " | ".join(f"{points[size]:.1f}" if size in points else "" for size in sizes) + " |")
    return "\n".join(found)
