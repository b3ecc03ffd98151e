"""fw-plot capacity and updates: loss of associative retrieval against the number of keys, as figure and as table."""

from __future__ import annotations

import re
from pathlib import Path

from .figure_style import Look, canvas, legend, log_values, look, plot

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
# In the order of their lines.
KNOWN = {
    "capacity": ["softmax", "elu", "dpfp1", "dpfp2", "dpfp3", "favor64", "favor128", "favor512"],
    "updates": [
        "sum:dpfp1",
        "delta:dpfp1",
        "fwm:tanh",
        "fwm:dpfp1",
        "gated:dpfp1",
        "decay:dpfp1",
        "gated_delta:dpfp1",
        "delta:elu",
        "delta:favor64",
    ],
}
MAPS, RULES = {"elu": "ELU", "dpfp": "DPFP", "favor": "FAVOR+"}, {"fwm": "FWM", "gated_delta": "gated delta"}
SOLVED = 0.001


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


def title(model: str) -> str:
    """dpfp1 -> DPFP-1; delta:favor64 -> delta, FAVOR+ 64."""
    if model == "elu":
        return "linear (ELU)"
    rule, _, name = model.rpartition(":")
    letters = name.rstrip("0123456789")
    number, joint = name[len(letters) :], "-" if letters == "dpfp" else " "
    return (f"{RULES.get(rule, rule)}, " if rule else "") + MAPS.get(letters, letters) + (joint + number if number else "")


def rank(figure: str, model: str) -> int:
    """A number of its own for each model."""
    known = KNOWN[figure]
    return known.index(model) if model in known else len(known) + sum(map(ord, model))


def look_of(figure: str, model: str) -> Look:
    """A model's own, whatever else is drawn."""
    return look(rank(figure, model))


def point_of_log(path: Path) -> tuple[str, str] | None:
    """The figure and the model, of a log of recipes/synthetic/point.sh by its name."""
    found = re.fullmatch(r"setting([12])-\d+-([a-z_]+)-([a-z]+)_(?:--(?:dpfp-nu|favor-features)_(\d+))?", path.stem)
    if not found:
        return None
    setting, rule, name, number = found.groups()
    return ("capacity", name + (number or "")) if setting == "1" else ("updates", f"{rule}:{name}{number or ''}")


def draw(args):
    """What was measured as lines with full markers, what was published as the same markers, hollow and alone."""
    published = PUBLISHED[args.command] if args.published else {}
    lines = read_results(args.results)
    figure, [axes] = canvas(2.4)
    order = sorted(lines, key=lambda model: rank(args.command, model))
    for model in order:
        style = look_of(args.command, model)
        plot(axes, style, title(model), lines[model], markevery=1)
        if model in published:
            hollow = {"mfc": "none", "ms": 5, "ls": ":", "lw": 0.5, "mew": 0.8, "color": style.color, "marker": style.marker}
            axes.plot(*zip(*sorted(published[model].items())), label="_", **hollow)
    if any(model in published for model in order):
        axes.plot([], [], "o:", color="black", mfc="none", ms=5, lw=0.5, mew=0.8, label="published (hollow)")
    axes.set(xlabel="keys", ylabel="evaluation loss")
    if args.command == "updates":
        log_values(axes)
        axes.axhline(SOLVED, color="0.3", lw=0.6, zorder=0)
    legend(figure, axes)
    return figure


def table(args) -> str:
    """Markdown: a column for each number of keys, what was published in a row of its own."""
    lines = read_results(args.results)
    published = PUBLISHED[args.command] if args.published else {}
    order = sorted(lines, key=lambda model: rank(args.command, model))
    sizes = sorted({keys for model in order for keys in (*lines[model], *published.get(model, ()))})
    found = ["| best evaluation loss | " + " | ".join(map(str, sizes)) + " |", "|---|" + "---:|" * len(sizes)]
    for model in order:
        for name, points in ((title(model), lines[model]), (f"{title(model)}, published", published.get(model))):
            if points:
                found.append(f"| {name} | " + " | ".join(number(points.get(keys)) for keys in sizes) + " |")
    return "\n".join(found)


def number(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.2g}" if loss < 0.1 else f"{loss:.3g}"
