"""The colours, dashes and markers of lines. What computes alike has one colour in all figures, and each line has dashes and a
marker of its own, so that neither colour-blind readers nor grey prints lose one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

# The hues of Okabe and Ito 2008, with another lightness each. Neighbours differ much in it, as the first few are used most.
COLOURS = ("#000000", "#BE5115", "#003A92", "#57B7ED", "#007149", "#DD8B00", "#8E2C74", "#8D8D8D")
BLACK, VERMILLION, BLUE, SKY, GREEN, ORANGE, PURPLE, GREY = COLOURS
DASHES, MARKERS = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2))), "osD^vPX*<>hdp"
FAMILIES = {
    BLACK: ["softmax"],
    VERMILLION: ["gated_delta", "kda", "gdn2", "rwkv7", "comba"],
    BLUE: ["delta", "delta_elu", "delta_dpfp", "delta_product"],
    SKY: ["sru", "srupp", "additive", "leap", "favor", "lstm", "fwm_lstm"],
    GREEN: ["decay", "gla", "mamba2", "retnet", "hgrn2", "rwkv6"],
    ORANGE: ["sum", "elu"],
    PURPLE: ["gated", "dpfp"],
    GREY: ["local_attention", "transformer_xl", "abc", "linformer", "fwm", "gsa"],
}
ALSO = {"transformer": "softmax", "transformer_lm": "softmax", "dense": "softmax", "linear": "elu", "performer": "favor"}
TITLES = {"transformer_lm": "softmax", "transformer": "softmax", "softmax attention": "softmax", "elu": "ELU", "dpfp": "DPFP"}
MODEL = re.compile(r"(fast_weight_(lm|transformer)|\+) ")  # before a name in a report


class Look(NamedTuple):
    """The look of a line."""

    color: str
    linestyle: object
    marker: str


def look(index: int) -> Look:
    """Returns a line's look: the first 104 differ, and the first eight differ in colour."""
    return Look(COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)], MARKERS[index % len(MARKERS)])


def _of_colour(colour: str, number: int) -> Iterator[Look]:
    """Yields the looks with a colour, first the one of a family's member with this number."""
    first = COLOURS.index(colour) + number
    return (Look(colour, DASHES[(number + n) % len(DASHES)], MARKERS[(first + n) % len(MARKERS)]) for n in range(52))


def looks(names: Iterable[str]) -> dict[str, Look]:
    """Returns the look of each line. Known series keep their colour in all figures; the others have what is left. No two lines of
    the first fifty are alike in grey."""
    names = list(dict.fromkeys(names))
    known = {name: place for name in names if (place := _place(name))}
    used = {colour for colour, _ in known.values()}
    found: dict[str, Look] = {}
    for name in [*known, *(name for name in names if name not in known)]:
        free = (look(index) for index in range(len(COLOURS)) if look(index).color not in used)
        wanted = _of_colour(*known[name]) if name in known else chain(free, map(look, range(len(COLOURS), 104)))
        taken = {each[1:] for each in found.values()}
        found[name] = next((each for each in wanted if each[1:] not in taken), look(len(found)))
    return {name: found[name] for name in names}


def _place(name: str) -> tuple[str, int] | None:
    """Returns the colour of the series that a name begins with, and its number among those with this colour."""
    short = MODEL.sub("", name).replace(" ", "_")
    series = {each: (colour, number) for colour, family in FAMILIES.items() for number, each in enumerate(family)}
    series.update({name: series[same] for name, same in ALSO.items()})
    begun = [each for each in series if re.match(f"{each}(?![a-z])", short)]
    return series[max(begun, key=len)] if begun else None


def colour_of(name: str) -> str:
    """Returns the colour of a known series, grey for another one."""
    place = _place(name)
    return place[0] if place else GREY


def ink(colour: str) -> str:
    """Returns the colour, darker if a text in it would be too pale on white."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    share = 0.62 if 0.21 * red + 0.72 * green + 0.07 * blue > 110 else 1.0
    return f"#{round(share * red):02X}{round(share * green):02X}{round(share * blue):02X}"


def title(name: str) -> str:
    """Returns the name of a report's row as a figure has it."""
    short = MODEL.sub("", name)
    return TITLES.get(short, short.replace("_", " "))
