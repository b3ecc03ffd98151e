"""Figures of the reports of fw-bench and of the benchmarks beside this folder: what each contender costs against length.

python docs/results/figures/cost.py generation docs/results/cost.json --out generation.svg
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from lines import finish, parser

from fw_fairseq.tools.plot.colours import colour_of, looks
from fw_fairseq.tools.plot.style import SMALL, canvas, draw_lengths, label_ends, log_lengths, log_values, plot

NOT_DRAWN = ("step loop", "cumulative sum", " with ", " after ")  # of ops: slow at every length, or with a feature map


class Panel(NamedTuple):
    """A number of each row, by how much it is multiplied, and its name."""

    key: str
    factor: float
    label: str


class Figure(NamedTuple):
    """What is drawn of a report against which length."""

    rows: str
    length: str
    label: str
    panels: list[Panel]


FIGURES = {
    "generation": Figure(
        "generation", "context", "tokens before", [Panel("seconds", 1e3, "ms per token"), Panel("state_bytes", 1e-6, "state, MB")]
    ),
    "training": Figure(
        "training", "tokens", "tokens of a row",
        [Panel("tokens_per_second", 1, "tokens/s"), Panel("peak_bytes", 1e-6, "peak memory, MB")],
    ),
    "ops": Figure("forward_backward", "tokens", "tokens", [Panel("seconds", 1e3, "forward + backward, ms")]),
    "translation": Figure(
        "decoding", "tokens", "tokens of source and translation",
        [Panel("sentences_per_second", 1, "sentences/s"), Panel("state_bytes", 1e-6, "state in the end, MB")],
    ),
}  # fmt: skip


def draw_report(report: dict, name: str) -> Any:
    """Draws one of ``FIGURES``."""
    what = FIGURES[name]
    rows = [row for row in report[what.rows] if name != "ops" or not any(part in row["name"] for part in NOT_DRAWN)]
    return draw_lengths(rows, what.length, what.panels, what.label)


def draw_sizes(report: dict) -> Any:
    """The time of a token of each model against the tokens before it: a panel for each size, with the fewest threads."""
    rows = report["tokens"]
    threads = min(row["threads"] for row in rows)
    rows = [row for row in rows if row["threads"] == threads]
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    figure, axes = canvas(0.7 + 2.3 * len(sizes), len(sizes))
    styles = looks(row["name"] for row in rows)
    for axis, size in zip(axes, sizes):
        for name, style in styles.items():
            points = {row["context"]: 1e3 * row["seconds"] for row in rows if (row["size"], row["name"]) == (size, name)}
            if points:
                plot(axis, style, name, points)
        axis.set_ylabel(f"{size}, ms per token")
        log_values(axis)
        log_lengths(axis, (row["context"] for row in rows))
    axes[-1].set_xlabel("tokens before")
    figure.align_ylabels()
    label_ends(*axes)
    return figure


def draw_bars(report: dict) -> Any:
    """One bar for each layer."""
    figure, [axes] = canvas(3.0)
    peers = [{**row, "name": f"{row['name']}: {row['layer']}"} for row in report.get("peers", [])]
    rows = (peers or report["layers"])[::-1]
    colours = [colour_of(row["name"]) for row in rows]
    bars = axes.barh([row["name"] for row in rows], [1e3 * row["seconds"] for row in rows], color=colours, height=0.7)
    axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=SMALL)
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
