"""fw-plot: figures and tables of the papers from logs. Figures by the ending of --out; lines differ without colours too."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from . import tables

LINE_STYLES, MARKERS = ("-", "--", ":", "-."), "osD^vPX*<>hd"
COLUMN, HEIGHT = 4.6, 3.2  # inches

# Schlag et al. 2021: best evaluation loss by number of keys, from the logs that they published.
PUBLISHED = {
    "capacity": {
        "softmax": {100: 2e-5, 200: 9e-6, 300: 6e-6, 400: 3e-6},
        "elu": {100: 0.16, 200: 0.34, 300: 0.40, 400: 0.42},
        "favor64": {100: 0.5, 200: 0.5, 300: 0.5, 400: 0.5},
        "dpfp1": {100: 0.0002, 200: 0.17, 300: 0.29, 400: 0.34},
        "dpfp2": {100: 0.0005, 200: 0.0004, 300: 0.068, 400: 0.16},
        "dpfp3": {100: 0.0005, 200: 0.0009, 300: 0.0003, 400: 0.036},
    },
    "updates": {
        "delta:dpfp1": {20: 0.0008, 60: 0.0049, 100: 0.0001, 200: 0.17},
        "sum:dpfp1": {20: 0.097, 60: 0.10, 100: 0.11, 200: 0.23},
        "fwm:tanh": {20: 1.5, 60: 9, 100: 42, 200: 96},
    },
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="fw-plot", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("capacity", "without replacement, linear axis"), ("updates", "with replacement, logarithmic axis")):
        command = commands.add_parser(name, help=f"evaluation loss of associative retrieval against the number of keys, {what}")
        command.add_argument("results", type=Path, help="what recipes/synthetic/sweep.sh wrote: lines of MODEL KEYS LOSS")
        command.add_argument("--published", action="store_true", help="the published values beside, as crosses")
    curves = commands.add_parser("curves", help="a metric against updates, one line for each run")
    curves.add_argument("logs", nargs="+", type=Path, help="logs of fairseq-train --log-format json; named by their files")
    curves.add_argument("--metric", default="valid_loss", help="a key of the logs, default valid_loss")
    curves.add_argument("--log-axis", action="store_true", help="logarithmic values")
    for command in commands.choices.values():
        command.add_argument("--out", type=Path, nargs="+", required=True, help="files to write, .svg, .pdf or .png")
    tables.add_arguments(
        commands.add_parser("tables", help="finished runs of recipes in the papers' tables, beside what was published")
    )
    args = parser.parse_args(arguments)
    try:
        if args.command == "tables":
            return tables.main(args)
        draw = draw_curves if args.command == "curves" else draw_retrieval
        save(draw(args), args.out)
    except (OSError, ValueError) as error:
        sys.exit(f"fw-plot: error: {error}")


def read_results(path: Path) -> dict[str, dict[int, float]]:
    """Loss by model and number of keys."""
    found: dict[str, dict[int, float]] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            model, keys, loss = line.split()
            found.setdefault(model, {})[int(keys)] = float(loss)
        except ValueError:
            raise ValueError(f"{path}, line {number} is {line!r}; it must be MODEL KEYS LOSS") from None
    if not found:
        raise ValueError(f"{path} has no results")
    return found


def read_log(path: Path, metric: str) -> dict[int, float]:
    """The metric by update. fairseq logs it under its name in lines of their own kind: train_inner, train, valid."""
    values = {}
    for line in path.read_text().splitlines():
        start = line.find("{")
        try:
            entry = json.loads(line[start:]) if start >= 0 else {}
        except json.JSONDecodeError:
            continue
        prefix = metric.split("_")[0]
        update = entry.get(f"{prefix}_num_updates", entry.get("num_updates"))
        if metric in entry and update is not None:
            values[int(update)] = float(entry[metric])
    if not values:
        raise ValueError(f"{path} has no {metric}; train with --log-format json")
    return values


def draw_retrieval(args):
    published = PUBLISHED[args.command] if args.published else {}
    lines = read_results(args.results)
    figure, axes = canvas()
    for index, (model, points) in enumerate(lines.items()):
        colour = plot_line(axes, index, model, points)
        if model in published:
            axes.plot(*zip(*sorted(published[model].items())), "x", color=colour, ms=7, label="_")
    if published:
        axes.plot([], [], "x", color="black", ms=7, label="published")
    axes.axhline(0.001, color="black", lw=0.6)
    axes.set(xlabel="keys", ylabel="evaluation loss", **({"yscale": "log"} if args.command == "updates" else {}))
    finish(axes)
    return figure


def draw_curves(args):
    figure, axes = canvas()
    for index, path in enumerate(args.logs):
        plot_line(axes, index, path.stem, read_log(path, args.metric))
    axes.set(xlabel="updates", ylabel=args.metric.replace("_", " "), yscale="log" if args.log_axis else "linear")
    finish(axes)
    return figure


def canvas():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(COLUMN, HEIGHT), layout="constrained")


def plot_line(axes, index: int, label: str, points: dict[int, float]):
    style = {"ls": LINE_STYLES[index % len(LINE_STYLES)], "marker": MARKERS[index % len(MARKERS)], "ms": 3.5, "lw": 1.1}
    [line] = axes.plot(*zip(*sorted(points.items())), label=label, **style, markevery=max(1, len(points) // 12))
    return line.get_color()


def finish(axes) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7)


def save(figure, paths: list[Path]) -> None:
    """Each file appears whole or not at all."""
    for path in paths:
        part = path.with_name(f".{path.stem}.part{path.suffix}")
        figure.savefig(part, dpi=200)
        os.replace(part, path)
        print(path)


if __name__ == "__main__":
    main()
