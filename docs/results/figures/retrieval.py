"""Loss of associative retrieval against the number of keys (capacity: without replacement, updates: with it), of the lines of
recipes/synthetic/sweep.sh; and curves of recipes/synthetic/point.sh, with the same look of each model.

The published losses are the best ones of evaluation in the logs that Schlag et al. 2021 published. FAVOR+ with the delta rule is
NaN from 140 keys on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lines import finish, markdown, parser, read_results
from published import read_losses

from fw_fairseq.tools.plot.__main__ import draw_curves
from fw_fairseq.tools.plot.colours import BLACK, Look, looks
from fw_fairseq.tools.plot.style import canvas, legend, log_values, plot

KNOWN = {  # models in the order of their lines in a figure
    "capacity": ["softmax", "elu", "dpfp1", "dpfp2", "dpfp3", "favor64", "favor128", "favor512"],
    "updates": [
        "sum:dpfp1", "delta:dpfp1", "fwm:tanh", "fwm:dpfp1", "gated:dpfp1", "decay:dpfp1", "gated_delta:dpfp1", "delta:elu",
        "delta:favor64",
    ],
}  # fmt: skip
MAPS, RULES = {"elu": "ELU", "dpfp": "DPFP", "favor": "FAVOR+"}, {"fwm": "FWM", "gated_delta": "gated delta"}
SOLVED = 0.001
Lines = dict[str, dict[int, float]]


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
    return looks([*KNOWN[figure], model])[model]


def point_of_log(path: Path) -> tuple[str, str]:
    """Returns the figure and the model of a log of recipes/synthetic/point.sh, by the file's name."""
    form = r"setting([12])-\d+-([a-z_]+)-([a-z]+)_(?:--(?:dpfp-nu|favor-features)_(\d+))?"
    found = re.fullmatch(form, path.stem)
    assert found, f"{path} has another name than point.sh gives"
    setting, rule, name, number = found.groups()
    return ("capacity", name + (number or "")) if setting == "1" else ("updates", f"{rule}:{name}{number or ''}")


def draw(figure_name: str, lines: Lines, published: Lines) -> Any:
    """Draws measured losses as lines with full markers, and published losses as hollow markers."""
    figure, [axes] = canvas(4.0)
    for model, points in lines.items():
        style = look_of(figure_name, model)
        plot(axes, style, title(model), points, markevery=1)
        if model in published:
            hollow = {"mfc": "none", "ms": 8, "ls": ":", "lw": 0.8, "mew": 1.1, "color": style.color, "marker": style.marker}
            axes.plot(*zip(*sorted(published[model].items())), label="_", **hollow)
    if any(model in published for model in lines):
        axes.plot([], [], "o:", color=BLACK, mfc="none", ms=8, lw=0.8, mew=1.1, label="published (hollow)")
    axes.set(xlabel="keys", ylabel="evaluation loss")
    if figure_name == "updates":
        log_values(axes)
        axes.axhline(SOLVED, color="0.4", lw=1, zorder=0)
    legend(figure, axes)
    return figure


def table(lines: Lines, published: Lines, sizes: list[int] | None = None) -> str:
    """Returns Markdown with a column for each number of keys, or for ``sizes``; published losses have rows of their own."""
    sizes = sizes or sorted({keys for model in lines for keys in (*lines[model], *published.get(model, ()))})
    both = {title(model): points for model, points in lines.items()}
    rows = {}
    for model, name in zip(lines, both):
        rows[name] = both[name]
        if model in published:
            rows[f"{name}, published"] = published[model]
    return markdown("best evaluation loss", sizes, {name: [number(row.get(keys)) for keys in sizes] for name, row in rows.items()})


def number(loss: float | None) -> str:
    """Two digits of a small loss, three of a large one."""
    return "" if loss is None else f"{loss:.2g}" if loss < 0.1 else f"{loss:.3g}"


def main() -> None:
    """Draws what the command line asks for."""
    asked = parser(__doc__, (*KNOWN, "curves"))
    asked.add_argument("others", type=Path, nargs="*", help="of curves: more logs")
    asked.add_argument("--published", action="store_true", help="the published values too")
    asked.add_argument("--columns", type=int, metavar="KEYS", nargs="+", help="of the table, in place of all numbers of keys")
    args = asked.parse_intermixed_args()
    if args.figure == "curves":
        logs = {point_of_log(path): path for path in (args.file, *args.others)}
        drawn = sorted(logs, key=lambda point: rank(*point))
        curves = [(title(model), look_of(figure, model), logs[figure, model]) for figure, model in drawn]
        return finish(args, lambda: draw_curves(curves, "valid_loss", log_axis=True, log_updates=True))
    results, published = read_results(args.file), read_losses(args.figure) if args.published else {}
    order = {model: results[model] for model in sorted(results, key=lambda model: rank(args.figure, model))}
    finish(args, lambda: draw(args.figure, order, published), lambda: table(order, published, args.columns))


if __name__ == "__main__":
    main()
