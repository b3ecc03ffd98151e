"""fw-plot state: perplexity against the size of the state, from the table of recipes/wikitext2/table.sh."""

from __future__ import annotations

import re
from pathlib import Path

from .figure_style import SMALL, canvas, look, spread_out

SOUGHT = {"row": "row", "perplexity": "test perplexity", "state": "numbers kept"}
RULES, SOFTMAX = ("sum", "gated", "delta", "decay"), "softmax"


def read_table(path: Path) -> dict[str, tuple[float, float]]:
    """Size of the state and perplexity by row, of the first table with columns for them."""
    columns: dict[str, int] = {}
    found: dict[str, tuple[float, float]] = {}
    for line in path.read_text().splitlines():
        cells = [cell.strip(" `*") for cell in line.split("|")[1:-1]]
        if not columns:
            places = {key: [i for i, cell in enumerate(cells) if cell.startswith(start)] for key, start in SOUGHT.items()}
            columns = {key: at[0] for key, at in places.items() if at} if all(places.values()) else {}
        elif not cells:
            break
        elif not set(cells[0]) <= set("-:"):
            size, perplexity = (re.match(r"[\d.]+", cells[columns[key]].replace(",", "")) for key in ("state", "perplexity"))
            if size and perplexity:
                found[cells[columns["row"]]] = float(size[0]), float(perplexity[0])
    if not found:
        raise ValueError(f"{path} has no table with the columns {', '.join(SOUGHT.values())}")
    return found


def draw_state(args):
    """Names beside their points, of the smaller half to the left."""
    rows = read_table(args.page)
    figure, [axes] = canvas(2.7)
    for name, point in rows.items():
        axes.plot(*point, ls="", ms=4.2, marker=kind(name).marker, color=kind(name).color)
    sizes = sorted(size for size, _ in rows.values())
    axes.set(xscale="log", xlabel="numbers kept of a text", ylabel="test perplexity", xlim=(sizes[0] / 5, sizes[-1] * 4))
    figure.draw_without_rendering()
    low, high = axes.get_ylim()
    gap = (high - low) * 1.2 * SMALL / (72 * axes.get_window_extent().height / figure.dpi)
    for left in (True, False):
        side = {name: point for name, point in rows.items() if (point[0] < sizes[len(sizes) // 2]) == left}
        for (name, (size, perplexity)), at in zip(side.items(), spread_out([y for _, y in side.values()], gap)):
            colour = kind(name).color
            axes.annotate(
                name.replace("_", " "), (size, perplexity), (size / 1.5 if left else size * 1.5, at), va="center",
                ha="right" if left else "left", fontsize=SMALL, color=colour,
                arrowprops={"arrowstyle": "-", "lw": 0.4, "color": colour, "relpos": (left, 0.5), "shrinkA": 0.5, "shrinkB": 2},
            )  # fmt: skip
    return figure


def kind(name: str):
    return look(0 if name == SOFTMAX else 1 if name.startswith(RULES) else 2)
