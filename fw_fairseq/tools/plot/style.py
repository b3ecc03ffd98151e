"""The look of every figure: one column wide, text as text, and a marker and dashes for each line, so that grey prints are
readable."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from ...files import write_atomically
from ..command import require_matplotlib

COLUMN = 3.3  # inches, a column of a two-column page
SMALL, TEXT = 6.5, 7.5  # points
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#8C4FA8", "#B8860B", "#5B5B5B")
DASHES, MARKERS = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2))), "osD^vPX*<>hd"
UNDATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
SETTINGS: dict[Any, Any] = {
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"], "font.size": TEXT,
    "axes.labelsize": TEXT, "xtick.labelsize": SMALL, "ytick.labelsize": SMALL, "legend.fontsize": SMALL,
    "axes.linewidth": 0.6, "xtick.major.width": 0.6, "ytick.major.width": 0.6, "xtick.major.size": 2.5, "ytick.major.size": 2.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "0.88", "grid.linewidth": 0.5,
    "axes.axisbelow": True, "lines.linewidth": 1.1, "lines.markersize": 3.6, "svg.fonttype": "none", "pdf.fonttype": 42,
    "svg.hashsalt": "fw_fairseq",
}  # fmt: skip


class Look(NamedTuple):
    """The look of a line."""

    color: str
    linestyle: object
    marker: str


def look(index: int) -> Look:
    """Returns a line's look: the first 84 differ, and the first seven differ in colour."""
    return Look(COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)], MARKERS[index % len(MARKERS)])


def canvas(height: float = 2.3, panels: int = 1, **layout: float) -> tuple[Any, list]:
    """Returns a figure of one column and its axes, one above the other. ``layout``: fixed margins, as in subplots_adjust."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(SETTINGS)
    figure, axes = pyplot.subplots(
        panels, 1, figsize=(COLUMN, height), squeeze=False, sharex=True, layout=None if layout else "constrained"
    )
    if layout:
        figure.subplots_adjust(**layout)
    return figure, list(axes[:, 0])


def plot(axes: Any, look: Look, label: str, points: dict, **style: Any) -> None:
    """A line with a marker at each point, or where there are many at even distances."""
    style = {"markevery": 1 if len(points) <= 12 else 0.07, **look._asdict(), **style}
    axes.plot(*zip(*sorted(points.items())), label=label, **style)


def log_lengths(axes: Any, lengths: Iterable[int]) -> None:
    """A logarithmic axis with these lengths, and no others, on it."""
    axes.set_xscale("log")
    axes.set_xticks(ticks := sorted(set(lengths)), [str(tick) for tick in ticks])
    axes.xaxis.minorticks_off()


def log_values(axes: Any, name: str = "y") -> None:
    """A logarithmic axis with plain numbers, and more of them where it spans little."""
    from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

    axes.set(**{f"{name}scale": "log"})
    axis = getattr(axes, f"{name}axis")
    low, high = axis.get_view_interval()
    locator: Any = LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,))
    if sum(low <= tick <= high for tick in locator.tick_values(low, high)) < 2:
        locator = MaxNLocator(4, steps=[1, 2, 5, 10])
    axis.set_major_locator(locator)
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter("{x:g}")


def legend(figure: Any, axes: Any) -> None:
    """Draws the legend below the axes in as many columns as fit; the figure grows with the legend's lines."""
    handles, labels = axes.get_legend_handles_labels()
    for columns in range(min(3, len(labels)), 0, -1):
        drawn = figure.legend(
            handles, labels, loc="outside lower center", ncols=columns, frameon=False, handlelength=2.6, columnspacing=1.2
        )
        if drawn.get_window_extent().width <= figure.bbox.width or columns == 1:
            break
        drawn.remove()
    figure.set_figheight(figure.get_figheight() + 1.5 * SMALL / 72 * ceil(len(labels) / columns))


def draw_lengths(rows: list[dict], length: str, panels: Iterable[tuple[str, float, str]], label: str) -> Any:
    """Draws numbers of a benchmark's rows against their ``length``, both axes logarithmic, a line for each name. panels: the key of
    each number, its factor and its name."""
    panels, names = list(panels), list(dict.fromkeys(row["name"] for row in rows))
    figure, axes = canvas(0.5 + 1.5 * len(panels), len(panels))
    for axis, (key, factor, text) in zip(axes, panels):
        for index, name in enumerate(names):
            points = {row[length]: factor * row[key] for row in rows if row["name"] == name and row[key] > 0}
            if points:
                plot(axis, look(index), name, points)
        axis.set_ylabel(text)
        log_values(axis)
        log_lengths(axis, (row[length] for row in rows))
    axes[-1].set_xlabel(label)
    legend(figure, axes[0])
    return figure


def save(figure: Any, paths: list[Path]) -> None:
    """Writes the figure to each path; equal figures make equal files."""
    from matplotlib import pyplot

    for path in paths:
        options = {"dpi": 300, "format": path.suffix[1:] or "png", "metadata": UNDATED.get(path.suffix)}
        write_atomically(path, lambda part: figure.savefig(part, **options))  # noqa: B023
        print(path)
    pyplot.close(figure)
