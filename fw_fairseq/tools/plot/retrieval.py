"""fw-plot capacity and updates: loss of associative retrieval against the number of keys, as figure and as table."""

from __future__ import annotations

import re
from pathlib import Path

from ... import Mistake
from .style import Look, canvas, legend, log_values, look, plot

SIZES = (*range(20, 201, 20), 300, 400)


def by_keys(*losses: float) -> dict[int, float]:
    """Of the first SIZES."""
    return dict(zip(SIZES, losses))


# Best evaluation losses in the logs that Schlag et al. 2021 published. FAVOR+ with the delta rule is NaN from 140 keys on.
PUBLISHED = {
    "capacity": {
        "softmax": by_keys(0.00063, 0.00032, 7.2e-05, 3e-05, 2e-05, 1.1e-05, 7e-06, 5.7e-06, 6.2e-06, 8.6e-06, 5.5e-06, 2.8e-06),
        "elu": by_keys(0.00089, 0.00083, 0.025, 0.11, 0.16, 0.23, 0.27, 0.3, 0.32, 0.34, 0.4, 0.42),
        "dpfp1": by_keys(0.00078, 0.00027, 0.00043, 0.00017, 0.00021, 0.0083, 0.051, 0.1, 0.14, 0.17, 0.29, 0.34),
        "dpfp2": by_keys(0.00031, 0.00063, 0.00097, 0.0006, 0.0005, 0.00029, 0.00051, 0.00038, 0.00028, 0.00037, 0.068, 0.16),
        "dpfp3": by_keys(0.00048, 0.00087, 0.00049, 0.00074, 0.00048, 0.0005, 0.00086, 0.00025, 0.00041, 0.00088, 0.00025, 0.036),
        "favor64": by_keys(0.12, 0.27, 0.48, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5),
        "favor128": by_keys(0.074, 0.18, 0.48, 0.49, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5),
        "favor512": by_keys(0.024, 0.075, 0.41, 0.49, 0.5, 0.5, 0.49, 0.5, 0.5, 0.5, 0.5, 0.5),
    },
    "updates": {
        "sum:dpfp1": by_keys(0.097, 0.1, 0.1, 0.11, 0.11, 0.13, 0.15, 0.18, 0.2, 0.23),
        "delta:dpfp1": by_keys(0.00077, 0.00097, 0.0049, 0.0063, 8.6e-05, 0.014, 0.047, 0.1, 0.13, 0.17),
        "fwm:tanh": by_keys(1.5, 4.8, 9, 30, 42, 56, 60, 75, 85, 96),
        "fwm:dpfp1": by_keys(0.04, 0.49, 0.5, 0.5, 0.53, 0.56, 0.74, 2, 2.5, 1.1),
        "delta:elu": by_keys(0.0008, 0.00068, 0.00051, 0.094, 0.15, 0.21, 0.26, 0.28, 0.31, 0.34),
        "delta:favor64": by_keys(0.1, 0.18, 0.4, 0.49, 0.5, 0.5),
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
            raise Mistake(f"{path}, line {number} is {line!r}; it must be MODEL KEYS LOSS") from None
    if not found:
        raise Mistake(f"{path} has no results")
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
