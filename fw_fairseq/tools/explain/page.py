"""Shows weights as shaded words in a page that loads nothing else, and as lines of cells in a picture."""

from __future__ import annotations

import html
import importlib.util
from pathlib import Path

from torch import Tensor

from ... import Mistake
from ...files import write_atomically
from .weights import relative

SHORT = 40  # tokens; longer texts are drawn in lines of this many, without heads
STRONGEST = 5
POSITIVE, NEGATIVE = "31,119,180", "214,39,40"
STYLE = """
body { font: 15px/1.7 sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #111; background: #fff }
h2 { font-size: 1em; margin: 1.6em 0 .2em }
p { margin: .3em 0 } .note, summary { color: #555; font-size: .9em } details p { margin-left: 1.5em }
span { padding: .1em .15em; border-radius: .2em } span:last-child { outline: 1px solid #999 }
"""
NOTE = (
    "Blue: positive weight, red: negative, as strong as the weight is beside the largest of its row. A layer's own line is the mean"
    " of its heads, each beside its largest. The outlined token is the one that reads. A word with ? is not in the dictionary."
)


def page(title: str, words: list[str], parts: list) -> str:
    """Returns the page: a line for each part and, folded, for each of its heads."""
    lines = [f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"]
    lines += [f"<h1>{html.escape(title)}</h1>", f"<p class=note>{NOTE}</p>"]
    for part in parts:
        lines += [f"<h2>{html.escape(part.name())}</h2>", f"<p>{shaded(words, mean := part.mean(), mean)}</p>"]
        lines.append(f"<details><summary>{len(part.heads)} head{'s' * (len(part.heads) > 1)}, and their strongest tokens</summary>")
        for number, weights in enumerate(part.heads, 1):
            lines.append(f"<p><b>{number}</b> <i class=note>{html.escape(strongest(words, weights))}</i><br>")
            lines.append(f"{shaded(words, relative(weights), weights)}</p>")
        lines.append("</details>")
    return "\n".join([*lines, "</html>"]) + "\n"


def shaded(words: list[str], relative: Tensor, weights: Tensor) -> str:
    """Returns words with their weight as background, and the number in their title."""
    cells = []
    for number, (word, shade, weight) in enumerate(zip(words, relative.tolist(), weights.tolist())):
        colour = f"rgba({POSITIVE if shade >= 0 else NEGATIVE},{abs(shade):.2f})"
        dark = ";color:#fff" if abs(shade) > 0.6 else ""
        cells.append(f'<span style="background:{colour}{dark}" title="{number}: {weight:.3g}">{html.escape(word)}</span>')
    return " ".join(cells)


def strongest(words: list[str], weights: Tensor) -> str:
    order = weights.abs().argsort(descending=True)[:STRONGEST].tolist()
    return ", ".join(f"{words[i]} ({i}) {weights[i]:.2g}" for i in order)


def require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise Mistake("--png needs matplotlib; install fw_fairseq with the extra [plots]")


def draw(title: str, words: list[str], parts: list, path: Path) -> None:
    """Writes a picture. Rows are heads if the text is short, or else parts; long texts continue in the next band of cells."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels, rows, borders = rows_of(parts, heads=len(words) <= SHORT)
    bands = range(0, len(words), SHORT)
    columns = min(SHORT, len(words))
    height = 0.2 * len(rows) + 0.85  # inches, with the words above
    size = (max(5, 2.2 + 0.32 * columns), len(bands) * height + 0.4)
    figure, axes = pyplot.subplots(len(bands), figsize=size, squeeze=False, layout="constrained")
    for start, axis in zip(bands, axes[:, 0]):
        cells = [row[start : start + SHORT] for row in rows]
        axis.imshow(cells, cmap="RdBu", vmin=-1, vmax=1, aspect="auto", extent=(-0.5, len(cells[0]) - 0.5, len(rows) - 0.5, -0.5))
        axis.set(xlim=(-0.5, columns - 0.5), yticks=range(len(rows)))
        shown = words[start : start + SHORT]
        axis.set_xticks(range(len(shown)), [plain(word) for word in shown], rotation=60, ha="left", rotation_mode="anchor")
        axis.set_yticklabels(labels)
        axis.tick_params(length=0, labelsize=8, top=False, bottom=False, labeltop=True, labelbottom=False)
        axis.spines[:].set_visible(False)
        axis.hlines([border - 0.5 for border in borders], -0.5, len(shown) - 0.5, color="black", lw=0.5)
    figure.suptitle(plain(title), fontsize=10)
    write_atomically(path, lambda part: figure.savefig(part, dpi=130, format=path.suffix[1:] or "png"))
    pyplot.close(figure)


def rows_of(parts: list, heads: bool) -> tuple[list[str], list[list[float]], list[int]]:
    """Returns the rows' labels, their weights relative to the largest, and the rows that have a border above: new parts or
    layers."""
    labels, rows, borders = [], [], []
    for before, part in zip([None, *parts], parts):
        if before is not None and (heads or part.layer != before.layer):
            borders.append(len(rows))
        if heads:
            labels += [f"{part.name()}, head 1", *(str(number) for number in range(2, len(part.heads) + 1))]
            rows += relative(part.heads).tolist()
        else:
            labels.append(part.name())
            rows.append(part.mean().tolist())
    return labels, rows, borders


def plain(text: str) -> str:
    """Returns the text without mathematics and no longer than fits."""
    text = text if len(text) <= 60 else text[:59] + "…"
    return text.replace("$", r"\$")
