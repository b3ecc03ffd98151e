"""What each model costs against length: the figures of fw-bench and of its reports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from .style import DASHES, LINE, MARKERS, Look, canvas, label_ends, log_lengths, log_values, plot

TRANSFORMER = "transformer_lm"
OWN = "fast_weight_lm "
TITLES = {TRANSFORMER: "softmax", "transformer": "softmax", "softmax attention": "softmax", "elu": "ELU", "dpfp": "DPFP"}
RECURRENT, BOUNDED = ("additive", "leap", "sru", "srupp"), ("local_attention", "transformer_xl", "abc", "linformer")


class Panel(NamedTuple):
    """A number of each row, by how much it is multiplied, and its name."""

    key: str
    factor: float
    label: str


class Figure(NamedTuple):
    """What is drawn of a report against which length."""

    help: str
    length: str
    label: str
    panels: tuple[Panel, ...]


FIGURES = {
    "generation": Figure(
        "time of a generated token, and what is kept for it, against the tokens before it",
        "context",
        "tokens before",
        (Panel("seconds", 1e3, "ms per token"), Panel("state_bytes", 1e-6, "state, MB")),
    ),
    "training": Figure(
        "speed and peak memory of training against the length of a row",
        "tokens",
        "tokens of a row",
        (Panel("tokens_per_second", 1, "tokens/s"), Panel("peak_bytes", 1e-6, "peak memory, MB")),
    ),
}


def draw_report(report: dict, name: str) -> Any:
    """Draws one of ``FIGURES`` out of a report of fw-bench model."""
    what = FIGURES[name]
    return draw_rows(report[name], what.length, what.panels, label=what.label)


def draw_rows(rows: list[dict], length: str, panels: Iterable[Panel], peer: str = TRANSFORMER, label: str = "tokens") -> Any:
    """``rows`` against their ``length``, both axes logarithmic, one panel above the other, names at the ends of the lines."""
    panels = [panel for panel in panels if any(panel.key in row for row in rows)]
    names = list(dict.fromkeys(row["name"] for row in rows))
    height = 0.45 + max(1.75, 1.1 * LINE / 72 * len(names)) * len(panels)  # the names of all lines fit beside each panel
    figure, axes = canvas(height, len(panels), left=0.17, right=0.75, top=1 - 0.06 / height, bottom=0.4 / height, hspace=0.1)
    for axis, panel in zip(axes, panels):
        ends = []
        for name in names:
            points = {
                row[length]: panel.factor * row[panel.key] for row in rows if row["name"] == name and row.get(panel.key, 0) > 0
            }
            if points:
                style = _look_of(name, names, peer)
                plot(axis, style, name, points, lw=1.6 if name == peer else 1)
                ends.append((_title(name), max(points.items()), style.color))
        axis.set_ylabel(panel.label)
        log_values(axis)
        log_lengths(axis, (row[length] for row in rows))
        label_ends(axis, ends)
    axes[-1].set_xlabel(label)
    figure.align_ylabels()
    return figure


def _title(name: str) -> str:
    short = name.removeprefix(OWN).removeprefix("fast_weight_transformer ")
    return TITLES.get(short, short.replace("_", " "))


def _look_of(name: str, names: list[str], peer: str) -> Look:
    """Colour and dashes by the kind of the mixer; the marker is its own."""
    short, marker = name.removeprefix(OWN), MARKERS[names.index(name) % len(MARKERS)]
    if name == peer:
        return Look("#000000", DASHES[0], marker)
    if short in RECURRENT:
        return Look("#D55E00", DASHES[2], marker)
    return Look("#009E73", DASHES[1], marker) if short in BOUNDED else Look("#0072B2", DASHES[0], marker)
