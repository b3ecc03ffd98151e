"""Reads the logs of runs that train until the validation loss no longer falls.

python status.py FOLDER...          a line for each run below the folders: how far it is
python status.py --cells RUN X...   the cells of a table: best validation perplexity, X..., epochs, hours
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ENDED = "stopping training because current learning rate"


class Run:
    """What the log of one run says; a run that was stopped and resumed has written one log."""

    def __init__(self, folder: Path):
        self.name = folder.name
        text = (folder / "train.log").read_text(encoding="utf-8", errors="replace")
        self.ended = ENDED in text
        self.epochs: dict[int, tuple[float, float]] = {}  # loss, perplexity
        self.seconds: dict[int, float] = {}
        for line in text.splitlines():
            entry = read(line)
            if "valid_loss" in entry:
                self.epochs[int(entry["epoch"])] = float(entry["valid_loss"]), float(entry["valid_ppl"])
            if "train_train_wall" in entry:
                self.seconds[int(entry["epoch"])] = float(entry["train_train_wall"])

    @property
    def best(self) -> tuple[int, float] | None:
        """The epoch of the lowest loss, and its perplexity."""
        epoch = min(self.epochs, key=lambda epoch: self.epochs[epoch][0], default=None)
        return None if epoch is None else (epoch, self.epochs[epoch][1])


def read(line: str) -> dict:
    """Returns the entry of a line of --log-format json, or nothing."""
    start = line.find("{")
    if start < 0:
        return {}
    try:
        entry = json.loads(line[start:])
    except json.JSONDecodeError:
        return {}
    return entry if isinstance(entry, dict) else {}


def state(run: Run) -> str:
    end = "finished" if run.ended else "unfinished"
    if run.best is None:
        return f"{run.name}: {end}, no epoch is complete"
    epoch, perplexity = run.best
    return f"{run.name}: {end}, {len(run.epochs)} epochs, best validation perplexity {perplexity:.2f} after epoch {epoch}"


def cells(run: Run, *values: str) -> str:
    if run.best is None:
        sys.exit(f"status.py: the log of {run.name} has no validation loss")
    return " | ".join([f"{run.best[1]:.2f}", *values, str(len(run.epochs)), f"{sum(run.seconds.values()) / 3600:.1f}"])


def main(*arguments: str) -> None:
    if arguments[:1] == ("--cells",):
        return print(cells(Run(Path(arguments[1])), *arguments[2:]))
    runs = sorted(log.parent for folder in arguments for log in Path(folder).glob("*/train.log"))
    print("\n".join(state(Run(run)) for run in runs) or "no run has begun")
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
