"""The look of every figure: as wide as a page's text, on white, text as text."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, inf
from pathlib import Path
from typing import Any

from ...files import write_atomically
from ..command import require_matplotlib
from .colours import Look, ink, looks, title

WIDTH = 7.0  # inches
SMALL, TEXT = 9.0, 10.0  # points
LINE = 1.2 * SMALL  # from one name to the next
UNDATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
SETTINGS: dict[Any, Any] = {
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"], "font.size": TEXT,
    "axes.labelsize": TEXT, "xtick.labelsize": SMALL, "ytick.labelsize": SMALL, "legend.fontsize": SMALL,
    "axes.titlesize": TEXT, "axes.titlelocation": "left", "axes.titleweight": "bold",
    "text.color": "0.1", "axes.labelcolor": "0.1", "axes.edgecolor": "0.35",
    "xtick.color": "0.35", "ytick.color": "0.35", "xtick.labelcolor": "0.1", "ytick.labelcolor": "0.1",
    "figure.facecolor": "white", "savefig.facecolor": "white", "axes.facecolor": "white",
    "axes.linewidth": 0.8, "xtick.major.width": 0.8, "ytick.major.width": 0.8, "xtick.major.size": 3, "ytick.major.size": 3,
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "0.9", "grid.linewidth": 0.8,
    "axes.axisbelow": True, "lines.linewidth": 1.7, "lines.markersize": 5.5, "svg.fonttype": "none", "pdf.fonttype": 42,
    "figure.constrained_layout.w_pad": 0.08, "figure.constrained_layout.h_pad": 0.08, "svg.hashsalt": "fw_fairseq",
}  # fmt: skip


def canvas(height: float = 3.4, panels: int = 1, beside: bool = False) -> tuple[Any, list]:
    """Returns a figure as wide as the text and its axes, one above the other or ``beside`` each other."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(SETTINGS)
    shape = (1, panels) if beside else (panels, 1)
    figure, axes = pyplot.subplots(*shape, figsize=(WIDTH, height), squeeze=False, sharex=not beside, layout="constrained")
    return figure, list(axes.flat)


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


def label_ends(*panels: Any) -> None:
    """Writes the names of lines right of their axes, in the order of their last points' heights and without overlap. The last step
    of a drawing, as the names stay where these axes had the points."""
    from matplotlib.transforms import offset_copy

    figure = panels[0].figure
    figure.draw_without_rendering()  # which gives the axes their size
    for axes in panels:
        lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
        ends = [line.get_xydata()[-1] for line in lines]
        heights = (axes.transData + axes.transAxes.inverted()).transform(ends)[:, 1].tolist()
        gap = LINE * figure.dpi / 72 / axes.get_window_extent().height
        beside = offset_copy(axes.transAxes, figure, x=16, units="points")
        for line, end, at in zip(lines, ends, spread_out(heights, gap, 0.02, 0.98)):
            leader = {"arrowstyle": "-", "lw": 0.6, "color": line.get_color(), "relpos": (0, 0.5), "shrinkA": 0.5, "shrinkB": 3}
            axes.annotate(
                line.get_label(), end, (1, at), textcoords=beside, va="center", fontsize=SMALL, color=ink(line.get_color()),
                arrowprops=leader, annotation_clip=False,
            )  # fmt: skip


def spread_out(wanted: list[float], gap: float, low: float = -inf, high: float = inf) -> list[float]:
    """Returns places in the same order, at least ``gap`` apart, and within the bounds if they fit."""
    groups: list[list[int]] = []

    def places(group: list[int]) -> list[float]:
        middle = sum(wanted[i] for i in group) / len(group)
        return [middle + gap * (n - (len(group) - 1) / 2) for n in range(len(group))]

    for index in sorted(range(len(wanted)), key=lambda i: wanted[i]):
        groups.append([index])
        while len(groups) > 1 and places(groups[-1])[0] - places(groups[-2])[-1] < gap:
            groups[-2:] = [groups[-2] + groups[-1]]
    order = [(i, at) for group in groups for i, at in zip(group, places(group))]
    inside = [max(min(at, high - gap * (len(order) - 1 - n)), low + gap * n) for n, (_, at) in enumerate(order)]
    return [at for _, at in sorted(zip((i for i, _ in order), inside))]


def draw_lengths(rows: list[dict], length: str, panels: Iterable[tuple[str, float, str]], label: str) -> Any:
    """Draws numbers of a benchmark's rows against their ``length``, both axes logarithmic, a line for each name, which stands
    at its end. panels: the key of each number, its factor and its name; those of which there is none are left out."""
    panels = [panel for panel in panels if any(panel[0] in row for row in rows)]
    styles = looks(row["name"] for row in rows)
    figure, axes = canvas(max(3.0, 0.7 + LINE / 72 * len(styles)), len(panels), beside=True)
    for axis, (key, factor, text) in zip(axes, panels):
        for name, style in styles.items():
            points = {row[length]: factor * row[key] for row in rows if row["name"] == name and row.get(key, 0) > 0}
            if points:
                plot(axis, style, title(name), points)
        axis.set(ylabel=text, xlabel=label)
        log_values(axis)
        log_lengths(axis, (row[length] for row in rows))
    label_ends(*axes)
    return figure


def save(figure: Any, paths: list[Path], dpi: int = 300) -> None:
    """Writes the figure to each path; equal figures make equal files."""
    from matplotlib import pyplot

    for path in paths:
        options = {"dpi": dpi, "format": path.suffix[1:] or "png", "metadata": UNDATED.get(path.suffix)}
        write_atomically(path, lambda part: figure.savefig(part, **options))  # noqa: B023
        print(path)
    pyplot.close(figure)
