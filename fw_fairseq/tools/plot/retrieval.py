"""fw-plot capacity and updates: loss of associative retrieval against the number of keys, as figure and as table.

The published losses are the best ones of evaluation in the logs that Schlag et al. 2021 published. FAVOR+ with the delta rule is
NaN from 140 keys on."""

from __future__ import annotations

import re
from pathlib import Path

from ...errors import Mistake
from ...files import read_text
from .published import read_losses
from .style import Look, canvas, legend, log_values, look, plot

# Models in the order of their lines in a figure.
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


def read_lines(path: Path, form: str, *kinds: type) -> list[list]:
    """Returns the words of each line, each as the type at its place. ``form``: what a line must be, the names of its words."""
    found = []
    for number, line in enumerate(read_text(path, f"lines of {form}").splitlines(), 1):
        words = line.split()
        try:
            values = [kind(word) for kind, word in zip(kinds, words)]
        except ValueError:
            values = []
        if not len(words) == len(values) == len(kinds):
            raise Mistake(f"{path}, line {number} is {line!r}; it must be {form}")
        found.append(values)
    if not found:
        raise Mistake(f"{path} has no results")
    return found


def read_results(path: Path) -> dict[str, dict[int, float]]:
    """Returns the value by model and number of keys, pairs or elements."""
    found: dict[str, dict[int, float]] = {}
    for model, size, value in read_lines(path, "MODEL SIZE VALUE", str, int, float):
        found.setdefault(model, {})[size] = value
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
    """Returns a number for each model, which its line keeps in every figure."""
    known = KNOWN[figure]
    return known.index(model) if model in known else len(known) + sum(map(ord, model))


def look_of(figure: str, model: str) -> Look:
    """Returns the look of a model's line, which does not depend on the other lines."""
    return look(rank(figure, model))


def point_of_log(path: Path) -> tuple[str, str] | None:
    """Returns the figure and the model of a log of recipes/synthetic/point.sh, by the file's name."""
    found = re.fullmatch(r"setting([12])-\d+-([a-z_]+)-([a-z]+)_(?:--(?:dpfp-nu|favor-features)_(\d+))?", path.stem)
    if not found:
        return None
    setting, rule, name, number = found.groups()
    return ("capacity", name + (number or "")) if setting == "1" else ("updates", f"{rule}:{name}{number or ''}")


def draw(args):
    """Draws measured losses as lines with full markers, and published losses as hollow markers."""
    published = read_losses(args.command) if args.published else {}
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
    """Returns Markdown with a column for each number of keys; published losses have rows of their own."""
    lines = read_results(args.results)
    published = read_losses(args.command) if args.published else {}
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
