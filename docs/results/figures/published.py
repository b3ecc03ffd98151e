"""The numbers that others published, which are in the CSV files of the folder published."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """A line of a published table."""

    labels: tuple[str, ...]
    published: tuple[str, ...]
    run: str  # its folder, {} of the table's files


def read(name: str) -> list[list[str]]:
    """Returns the cells of a file, the head first."""
    return list(csv.reader((Path(__file__).with_suffix("") / f"{name}.csv").read_text().splitlines()))


def read_rows(name: str, labels: int) -> list[Row]:
    """Returns the rows of a table whose first columns are ``labels`` and whose last one is the run."""
    return [Row(tuple(line[:labels]), tuple(line[labels:-1]), line[-1]) for line in read(name)[1:]]


def read_losses(name: str) -> dict[str, dict[int, float]]:
    """Returns the loss by model and number of keys; an empty cell was not published."""
    head, *lines = read(name)
    return {model: {int(keys): float(loss) for keys, loss in zip(head[1:], losses) if loss} for model, *losses in lines}
