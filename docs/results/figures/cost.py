"""Figures of the reports of fw-bench and of the benchmarks beside this folder: what each contender costs against length.

python docs/results/figures/cost.py generation docs/results/cost.json --out generation.svg
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from lines import LINE, finish, label_ends, parser

from fw_fairseq.tools.plot.style import DASHES, MARKERS, Look, canvas, log_lengths, log_values, look, plot

TRANSFORMER, SOFTMAX = "transformer_lm", "softmax attention"
OWN = "fast_weight_lm "
TITLES = {TRANSFORMER: "softmax", "transformer": "softmax", SOFTMAX: "softmax", "elu": "ELU", "dpfp": "DPFP"}
RECURRENT, BOUNDED = ("additive", "leap", "sru", "srupp"), ("local_attention", "transformer_xl", "abc", "linformer")
NOT_DRAWN = ("step loop", "cumulative sum", " with ", " after ")  # of ops: slow at every length, or with a feature map


class Panel(NamedTuple):
    """A number of each row, by how much it is multiplied, and its name."""

    key: str
    factor: float
    label: str


class Figure(NamedTuple):
    """What is drawn of a report against which length, and beside what."""

    rows: str
    length: str
    label: str
    panels: list[Panel]
    peer: str = TRANSFORMER


FIGURES = {
    "generation": Figure(
        "generation", "context", "tokens before", [Panel("seconds", 1e3, "ms per token"), Panel("state_bytes", 1e-6, "state, MB")]
    ),
    "training": Figure(
        "training", "tokens", "tokens of a row",
        [Panel("tokens_per_second", 1, "tokens/s"), Panel("peak_bytes", 1e-6, "peak memory, MB")],
    ),
    "ops": Figure("forward_backward", "tokens", "tokens", [Panel("seconds", 1e3, "forward + backward, ms")], SOFTMAX),
    "translation": Figure(
        "decoding", "tokens", "tokens of source and translation",
        [Panel("sentences_per_second", 1, "sentences/s"), Panel("state_bytes", 1e-6, "state in the end, MB")], "transformer",
    ),
}  # fmt: skip


def draw_report(report: dict, name: str) -> Any:
    """Draws one of ``FIGURES``."""
    what = FIGURES[name]
    rows = [row for row in report[what.rows] if name != "ops" or not any(part in row["name"] for part in NOT_DRAWN)]
    return draw_rows(rows, what.length, what.panels, what.peer, what.label)


def draw_rows(rows: list[dict], length: str, panels: list[Panel], peer: str = TRANSFORMER, label: str = "tokens") -> Any:
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
                style = look_of(name, names, peer)
                plot(axis, style, name, points, lw=1.6 if name == peer else 1)
                ends.append((title(name), max(points.items()), style.color))
        axis.set_ylabel(panel.label)
        log_values(axis)
        log_lengths(axis, (row[length] for row in rows))
        label_ends(axis, ends)
    axes[-1].set_xlabel(label)
    figure.align_ylabels()
    return figure


def title(name: str) -> str:
    """Returns the name of a line."""
    short = name.removeprefix(OWN).removeprefix("fast_weight_transformer ")
    return TITLES.get(short, short.replace("_", " "))


def look_of(name: str, names: list[str], peer: str) -> Look:
    """Colour and dashes by the kind of the mixer; the marker is its own."""
    short, marker = name.removeprefix(OWN), MARKERS[names.index(name) % len(MARKERS)]
    if name == peer:
        return Look("#000000", DASHES[0], marker)
    if short in RECURRENT:
        return Look("#D55E00", DASHES[2], marker)
    return Look("#009E73", DASHES[1], marker) if short in BOUNDED else Look("#0072B2", DASHES[0], marker)


def draw_sizes(report: dict) -> Any:
    """The time of a token of each model against the tokens before it: a panel for each size, with the fewest threads."""
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


def draw_bars(report: dict) -> Any:
    """One bar for each layer."""
    figure, [axes] = canvas(2.2)
    peers = [{**row, "name": f"{row['name']}: {row['layer']}"} for row in report.get("peers", [])]
    rows = (peers or report["layers"])[::-1]
    axes.barh([row["name"] for row in rows], [1e3 * row["seconds"] for row in rows], color="0.6", height=0.7)
    axes.set(xlabel="forward + backward, ms")
    axes.grid(visible=False, axis="y")
    return figure


def main() -> None:
    """Draws what the command line asks for."""
    args = parser(__doc__, (*FIGURES, "sparse", "layers")).parse_args()
    report = json.loads(args.file.read_text())
    others = {"sparse": draw_sizes, "layers": draw_bars}
    finish(args, lambda: others[args.figure](report) if args.figure in others else draw_report(report, args.figure))


if __name__ == "__main__":
    main()
