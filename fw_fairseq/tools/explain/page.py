"""Shows weights as shaded words in a page that loads nothing else."""

from __future__ import annotations

import html
from typing import NamedTuple

from torch import Tensor

from .weights import Part, relative

STRONGEST = 5
POSITIVE, NEGATIVE, SIZE = "31,119,180", "214,39,40", "84,39,143"
HATCHED = "repeating-linear-gradient(45deg,#ccc 0 1px,#fff 1px 5px)"
STYLE = f"""
body {{ font: 15px/1.7 sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #111; background: #fff }}
h1 {{ font-size: 1.3em; margin: 1.6em 0 .2em }} h2 {{ font-size: 1em; margin: 1.6em 0 .2em }}
p {{ margin: .3em 0 }} .note, summary {{ color: #555; font-size: .9em }} details p {{ margin-left: 1.5em }}
span {{ padding: .1em .15em; border-radius: .2em }} span:last-child {{ outline: 1px solid #999 }}
.outside {{ background: {HATCHED}; color: #888 }} .legend b {{ font-weight: normal; padding: .1em .6em; margin: 0 .4em }}
.bar {{ display: inline-block; width: 12em; height: 1em; vertical-align: middle; border: 1px solid #ccc;
  background: linear-gradient(90deg,rgb({NEGATIVE}),#fff,rgb({POSITIVE})) }}
.sizes {{ background: linear-gradient(90deg,#fff,rgb({SIZE})) }}
"""
LEGEND = (
    "<p class=legend>a layer: 0 <b class='bar sizes'></b> its largest mean size</p>"
    "<p class=legend>a head: largest weight, negative <b class=bar></b> positive; white: about 0"
    " <b class=outside>outside the window</b></p>"
)
NOTE = (
    "Each row has a scale of its own: a colour is as strong as the weight is beside the largest of its row. A layer's own line is"
    " the mean of the sizes of its heads' weights, without their signs; the heads are folded. The outlined token is the one that"
    " reads. A word with ? is not in the dictionary. Numbers are under the mouse."
)


class Shown(NamedTuple):
    """A token that reads: the words up to it, the weights of all layers, and the words that the model expects next."""

    words: list[str]
    parts: list[Part]
    expected: list[tuple[str, float]]  # and their probabilities

    def title(self) -> str:
        """Returns who reads."""
        return f"What “{self.words[-1]}” ({len(self.words) - 1}) reads"

    def next_words(self) -> str:
        """Returns the words that the model expects next."""
        return "expected next: " + ", ".join(f"{word} {100 * chance:.2g}%" for word, chance in self.expected)


def page(title: str, readings: list[Shown]) -> str:
    """Returns the page: for each token that reads, a line for each part and, folded, for each of its heads."""
    lines = [f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"]
    lines += [f"<h1>{html.escape(title)}</h1>", LEGEND, f"<p class=note>{NOTE}</p>"]
    for reading in readings:
        lines += [f"<h1>{html.escape(reading.title())}</h1>", f"<p>{html.escape(reading.next_words())}</p>"]
        for part in reading.parts:
            lines += section(reading.words, part)
    return "\n".join([*lines, "</html>"]) + "\n"


def section(words: list[str], part: Part) -> list[str]:
    """Returns the lines of one part."""
    sizes, outside = part.sizes(), part.outside()
    lines = [f"<h2>{html.escape(part.name())}</h2>", f"<p>{shaded(words, relative(sizes), sizes, outside, SIZE)}</p>"]
    lines.append(f"<details><summary>{len(part.heads)} head{'s' * (len(part.heads) > 1)}, and their strongest tokens</summary>")
    for number, weights in enumerate(part.heads, 1):
        lines.append(f"<p><b>{number}</b> <i class=note>{html.escape(strongest(words, weights))}</i><br>")
        lines.append(f"{shaded(words, relative(weights), weights, outside)}</p>")
    return [*lines, "</details>"]


def shaded(words: list[str], relative: Tensor, weights: Tensor, outside: int, positive: str = POSITIVE) -> str:
    """Returns words with their weight as background, and the number in their title; those before the window hatched."""
    cells = []
    for number, (word, shade, weight) in enumerate(zip(words, relative.tolist(), weights.tolist())):
        if number < outside:
            cells.append(f'<span class=outside title="{number}: outside the window">{html.escape(word)}</span>')
            continue
        colour = f"rgba({positive if shade >= 0 else NEGATIVE},{abs(shade):.2f})"
        dark = ";color:#fff" if abs(shade) > 0.6 else ""
        cells.append(f'<span style="background:{colour}{dark}" title="{number}: {weight:.3g}">{html.escape(word)}</span>')
    return " ".join(cells)


def strongest(words: list[str], weights: Tensor) -> str:
    """Returns the tokens with the largest weights."""
    order = weights.abs().argsort(descending=True)[:STRONGEST].tolist()
    return ", ".join(f"{words[i]} ({i}) {weights[i]:.2g}" for i in order)
