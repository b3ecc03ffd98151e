"""fw-plot parts: perplexity of rules with and without the parts around them, as figure and as table."""

from __future__ import annotations

from pathlib import Path
from statistics import mean, stdev

from ... import Mistake
from ...files import read_text
from .style import SMALL, canvas, legend, look

# The endings of rows in recipes/mixers.sh, in the order of the columns.
PARTS = {"": "none", "conv": "short convolution", "norm": "output norm", "gate": "output gate", "parts": "all three"}
LINE = "ROW SEED PERPLEXITY SLIDING"
Results = dict[str, dict[str, list[float]]]


def read_parts(path: Path, sliding: bool) -> Results:
    """Returns the perplexity of each seed by rule and part; the best rule without parts comes first."""
    found: Results = {}
    for number, line in enumerate(read_text(path, f"lines of {LINE}").splitlines(), 1):
        try:
            row, seed, plain, slid = line.split()
            int(seed)
            value = float(slid if sliding else plain)
        except ValueError:
            raise Mistake(f"{path}, line {number} is {line!r}; it must be {LINE}") from None
        rule, _, part = row.partition("-")
        if part not in PARTS:
            raise Mistake(f"{path}, line {number} has the row {row}; its ending must be {', '.join(filter(None, PARTS))} or none")
        found.setdefault(rule, {}).setdefault(part, []).append(value)
    if not found:
        raise Mistake(f"{path} has no results")
    return dict(sorted(found.items(), key=lambda item: next(mean(item[1][part]) for part in PARTS if part in item[1])))


def draw(args):
    """Draws a row for each rule and a point for each seed; a line goes from the mean without parts to the mean with all three."""
    rules = read_parts(args.results, args.sliding)
    figure, [axes] = canvas(0.5 + 0.17 * len(rules))
    for at, parts in enumerate(rules.values()):
        ends = [mean(parts[part]) for part in ("", "parts") if part in parts]
        axes.plot(ends, [at] * len(ends), color="0.6", lw=1, zorder=1)
    for index, (part, name) in enumerate(PARTS.items()):
        points = [(value, at) for at, parts in enumerate(rules.values()) for value in parts.get(part, ())]
        if points:
            style = {"color": look(index).color, "marker": look(index).marker, "ms": 3.4, "ls": "", "mew": 0.7, "clip_on": False}
            axes.plot(*zip(*points), label=name if part else "no parts", mfc=style["color"] if part else "white", **style)
    axes.set_yticks(range(len(rules)), [name.replace("_", " ") for name in rules], fontsize=SMALL)
    axes.set(xlabel="test perplexity" + (", sliding" if args.sliding else ""), ylim=(len(rules) - 0.4, -0.6))
    axes.grid(axis="y", visible=False)
    legend(figure, axes)
    return figure


def table(args) -> str:
    """Returns Markdown with a row for each rule and a column for each part: the mean, ± the deviation of several seeds."""
    rules = read_parts(args.results, args.sliding)
    drawn = [part for part in PARTS if any(part in parts for parts in rules.values())]
    head = "sliding perplexity" if args.sliding else "test perplexity"
    found = [f"| {head}, parts: | " + " | ".join(PARTS[part] for part in drawn) + " |", "|---|" + "---:|" * len(drawn)]
    for rule, parts in rules.items():
        found.append(f"| `{rule}` | " + " | ".join(cell(parts.get(part, [])) for part in drawn) + " |")
    return "\n".join(found)


def cell(values: list[float]) -> str:
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{mean(values):.1f}{spread}" if values else ""
