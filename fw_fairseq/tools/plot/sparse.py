"""The figure of fw-bench sparse: the time of a token of each model against the tokens before it, a panel for each size."""

from __future__ import annotations

from .style import canvas, label_ends, log_lengths, log_values, look, plot


def draw_report(report: dict):
    """Draws the rows with the fewest threads of each size."""
    rows = report["tokens"]
    threads = min(row["threads"] for row in rows)
    rows = [row for row in rows if row["threads"] == threads]
    sizes, names = (list(dict.fromkeys(row[key] for row in rows)) for key in ("size", "name"))
    height = 0.45 + 1.6 * len(sizes)
    figure, axes = canvas(height, len(sizes), left=0.17, right=0.66, top=1 - 0.12 / height, bottom=0.4 / height, hspace=0.16)
    for axis, size in zip(axes, sizes):
        ends = []
        for index, name in enumerate(names):
            points = {row["context"]: 1e3 * row["seconds"] for row in rows if (row["size"], row["name"]) == (size, name)}
            if points:
                plot(axis, look(index), name, points)
                ends.append((name, max(points.items()), look(index).color))
        axis.set_ylabel(f"{size}, ms per token")
        log_values(axis)
        log_lengths(axis, (row["context"] for row in rows))
        label_ends(axis, ends)
    axes[-1].set_xlabel("tokens before")
    figure.align_ylabels()
    return figure
