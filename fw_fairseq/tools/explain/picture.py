"""Draws weights as lines of cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ...files import write_atomically
from .page import Shown
from .weights import Part, relative

SHORT = 40  # tokens; longer texts are drawn in lines of this many, without heads
HATCH = "/////"


class Scale(NamedTuple):
    """What colours stand for."""

    label: str
    colours: str
    least: int


HEADS = Scale("weight / largest of its row", "RdBu", -1)
LAYERS = Scale("mean |weight| / largest of its row", "Purples", 0)


def draw(title: str, readings: list[Shown], path: Path) -> None:
    """Writes a picture. Rows are heads if the text is short, or else parts; long texts continue in the next band of cells."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    bands = [band for reading in readings for band in bands_of(reading)]
    columns = max(len(band.words) for band in bands)
    heights = [0.2 * len(band.rows) + 0.85 + 0.45 * bool(band.title) for band in bands]  # inches, with the words above
    size = (max(6.5, 3.2 + 0.32 * columns), sum(heights) + 0.9)
    ratios = {"height_ratios": heights}
    figure, axes = pyplot.subplots(len(bands), figsize=size, squeeze=False, layout="constrained", gridspec_kw=ratios)
    images = {band.scale: fill(axis, band, columns) for band, axis in zip(bands, axes[:, 0])}
    for scale, image in images.items():  # two where some texts are short and others long
        ticks = range(scale.least, 2)
        figure.colorbar(image, ax=list(axes[:, 0]), label=scale.label, shrink=2.2 / size[1], ticks=ticks, pad=0.01)
    if any(max(band.outside) > 0 for band in bands):
        handle = Patch(facecolor="white", edgecolor="0.6", hatch=HATCH, label="outside the window")
        figure.legend(handles=[handle], loc="outside lower right", fontsize=8, frameon=False)
    figure.suptitle(plain(title), fontsize=10)
    write_atomically(path, lambda part: figure.savefig(part, dpi=130, format=path.suffix[1:] or "png"))
    pyplot.close(figure)


class Band(NamedTuple):
    """Some tokens of a text, and their cells."""

    title: str  # over the first of a text
    words: list[str]
    labels: list[str]
    rows: list[list[float]]
    borders: list[int]  # rows that have a line above
    outside: list[int]  # of each row, how many of these tokens lie before the window
    scale: Scale = HEADS


def bands_of(reading: Shown) -> list[Band]:
    """Returns the text in pieces that fit into the picture."""
    labels, rows, borders = rows_of(reading.parts, heads := len(reading.words) <= SHORT)
    outside = [part.outside() for part in reading.parts for _ in range(len(part.heads) if heads else 1)]
    title, found = f"{reading.title()}; {reading.next_words()}", []
    for start in range(0, len(reading.words), SHORT):
        words, cells = reading.words[start : start + SHORT], [row[start : start + SHORT] for row in rows]
        left = [min(len(words), max(0, count - start)) for count in outside]
        found.append(Band("" if start else title, words, labels, cells, borders, left, HEADS if heads else LAYERS))
    return found


def fill(axis: Any, band: Band, columns: int) -> Any:
    """Draws the cells of a band, and returns what the colour bar describes."""
    from matplotlib.patches import Rectangle

    extent = (-0.5, len(band.words) - 0.5, len(band.rows) - 0.5, -0.5)
    image = axis.imshow(band.rows, cmap=band.scale.colours, vmin=band.scale.least, vmax=1, aspect="auto", extent=extent)
    for row, count in enumerate(band.outside):
        if count:
            axis.add_patch(Rectangle((-0.5, row - 0.5), count, 1, facecolor="white", edgecolor="0.6", hatch=HATCH, lw=0))
    axis.set(xlim=(-0.5, columns - 0.5), yticks=range(len(band.rows)))
    axis.set_xticks(range(len(band.words)), [plain(word) for word in band.words], rotation=60, ha="left", rotation_mode="anchor")
    axis.set_yticklabels(band.labels)
    axis.tick_params(length=0, labelsize=8, top=False, bottom=False, labeltop=True, labelbottom=False)
    axis.spines[:].set_visible(False)
    axis.hlines([border - 0.5 for border in band.borders], -0.5, len(band.words) - 0.5, color="black", lw=0.5)
    if band.title:
        axis.set_title(plain(band.title, 110), loc="left", fontsize=9)
    return image


def rows_of(parts: list[Part], heads: bool) -> tuple[list[str], list[list[float]], list[int]]:
    """Returns the rows' labels, their weights or sizes relative to the largest, and the rows that have a border above: new parts
    or layers."""
    labels: list[str] = []
    rows: list[list[float]] = []
    borders: list[int] = []
    for before, part in zip([None, *parts], parts):
        if before is not None and (heads or part.layer != before.layer):
            borders.append(len(rows))
        if heads:
            labels += [f"{part.name()}, head 1", *(str(number) for number in range(2, len(part.heads) + 1))]
            rows += relative(part.heads).tolist()
        else:
            labels.append(part.name())
            rows.append(relative(part.sizes()).tolist())
    return labels, rows, borders


def plain(text: str, most: int = 60) -> str:
    """Returns the text without mathematics and no longer than fits."""
    text = text if len(text) <= most else text[: most - 1] + "…"
    return text.replace("$", r"\$")
