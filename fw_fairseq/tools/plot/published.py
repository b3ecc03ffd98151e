"""The numbers that others published, which are in the CSV files beside this module."""

from __future__ import annotations

import csv
from importlib import resources
from typing import NamedTuple


class Row(NamedTuple):
    labels: tuple[str, ...]
    published: tuple[str, ...]
    run: str  # its folder, {} of the table's files


def read_lines(name: str) -> list[list[str]]:
    """Returns the cells of ``name``.csv, the head first."""
    text = resources.files(__package__).joinpath("data", f"{name}.csv").read_text(encoding="utf-8")
    return list(csv.reader(text.splitlines()))


def read_rows(name: str, labels: int) -> list[Row]:
    """Returns the rows of a table whose first columns are ``labels`` and whose last one is the run."""
    return [Row(tuple(line[:labels]), tuple(line[labels:-1]), line[-1]) for line in read_lines(name)[1:]]


def read_losses(name: str) -> dict[str, dict[int, float]]:
    """Returns the loss by model and number of keys; an empty cell was not published."""
    head, *lines = read_lines(name)
    return {model: {int(keys): float(loss) for keys, loss in zip(head[1:], losses) if loss} for model, *losses in lines}
