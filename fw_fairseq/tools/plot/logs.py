"""Metrics out of logs of fairseq-train and fairseq-hydra-train, written with --log-format json or simple."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from ...errors import Mistake
from ...files import read_text

SIMPLE = re.compile(r"(?:\| INFO \| |\]\[)(\w+)(?: \| |\]\[INFO\] - )(epoch \d+.*)")  # fairseq's beginning of a line, or Hydra's
PLACES = ("epoch", "update")  # of an entry, which are no metrics
PAIR = re.compile(r"(?:\| |[ ,])(\w+)[ =]([-+\d.eE]+|nan|-?inf)(?=,| \||$)")


def read_logs(paths: list[Path], metric: str) -> tuple[list[dict[int, float]], str]:
    """Returns the metric of each log by update, and its name. A metric of training, such as train_loss, is logged once in an epoch;
    where this makes less than two points of one log, the same metric of train_inner, which is logged at every --log-interval, is
    taken for all logs."""
    logs = [[read_line(line) for line in read_text(_source(path, metric), "a log of fairseq-train").splitlines()] for path in paths]
    if (inner := metric.removeprefix("train_")) != metric:
        epochs, steps = ([_by_update(entries, name) for entries in logs] for name in (metric, inner))
        if all(steps) and any(len(few) < min(2, len(more)) for few, more in zip(epochs, steps)):
            metric = inner
    found = [_by_update(entries, metric) for entries in logs]
    for path, entries, values in zip(paths, logs, found):
        if not values:
            names = dict.fromkeys(name for entry in entries for name in entry if name not in PLACES)
            there = [name for name in names if not name.endswith("num_updates") and _by_update(entries, name)]
            why = "it must be a log of fairseq-train with --log-format json or simple, with a metric of an update"
            why = f"--metric may be one that it has: {', '.join(there)}" if there else why
            raise Mistake(f"{path} has no {metric}; {why}")
    return found, metric


def read_log(path: Path, metric: str) -> dict[int, float]:
    """Returns the metric by update."""
    return read_logs([path], metric)[0][0]


def _source(path: Path, metric: str) -> Path:
    """The file with a metric of a log: those of layers are in a file of their own."""
    layers = path.with_name("layers.jsonl")
    return layers if "fw_" in metric and layers.exists() else path


def _by_update(entries: list[dict], metric: str) -> dict[int, float]:
    """Returns the values of a metric by the number of updates. The name of a validation set may have underscores."""
    parts = metric.split("_")
    places = [f"{'_'.join(parts[:count])}_num_updates" for count in range(len(parts) - 1, 0, -1)] + ["num_updates"]
    updates = (next((number(entry[place]) for place in places if place in entry), None) for entry in entries)
    found = ((at, number(entry.get(metric))) for at, entry in zip(updates, entries))
    return {int(at): value for at, value in found if value is not None and at is not None and math.isfinite(at)}


def number(value: object) -> float | None:
    """Returns a number that a log holds, which may be a text; None for anything else."""
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None


def read_line(line: str) -> dict:
    """Returns the metrics of a line by the names of JSON logs: train_inner has no prefix, the others have one, such as
    valid_loss. A line without any gives an empty dictionary."""
    if found := SIMPLE.search(line):
        kind, text = found.groups()
        prefix = "" if kind == "train_inner" else f"{kind}_"
        return {"epoch": int(text.split()[1].rstrip(":")), **{prefix + name: value for name, value in PAIR.findall(text)}}
    try:
        return json.loads(line[line.index("{") :])
    except (ValueError, RecursionError):  # no brace, or no JSON
        return {}
