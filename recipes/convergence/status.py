"""Reads the logs of runs that train until the validation loss no longer falls.

python status.py --ended SENTENCE FOLDER   a line for each run in the folder; SENTENCE is in the logs of finished ones
python status.py --cells RUN X...          the cells of a table: best validation perplexity, X..., epochs, hours
"""

from __future__ import annotations

import sys
from pathlib import Path

from fw_fairseq.tools.plot.logs import read_line


class Run:
    """The log of one run; a run that was stopped and resumed has written one log."""

    def __init__(self, folder: Path):
        self.name = folder.name
        self.text = (folder / "train.log").read_text(encoding="utf-8", errors="replace")
        self.validations: list[tuple[float, float, int]] = []  # loss, perplexity, epoch; some are within an epoch
        self.seconds: dict[int, float] = {}
        for entry in map(read_line, self.text.splitlines()):
            if "valid_loss" in entry:
                self.validations.append((float(entry["valid_loss"]), float(entry["valid_ppl"]), int(entry["epoch"])))
            if "train_train_wall" in entry:
                self.seconds[int(entry["epoch"])] = float(entry["train_train_wall"])

    @property
    def best(self) -> tuple[int, float] | None:
        """The epoch of the lowest loss, whose checkpoint is the best one, and its perplexity."""
        return min(self.validations)[:0:-1] if self.validations else None

    @property
    def epochs(self) -> int:
        """How many epochs there are."""
        return len({epoch for *_, epoch in self.validations})


def state(run: Run, ended: str) -> str:
    end = "finished" if ended in run.text else "unfinished"
    if run.best is None:
        return f"{run.name}: {end}, no epoch is complete"
    epoch, perplexity = run.best
    return f"{run.name}: {end}, {run.epochs} epochs, best validation perplexity {perplexity:.2f} in epoch {epoch}"


def cells(run: Run, *values: str) -> str:
    if run.best is None:
        sys.exit(f"status.py: the log of {run.name} has no validation loss")
    return " | ".join([f"{run.best[1]:.2f}", *values, str(run.epochs), f"{sum(run.seconds.values()) / 3600:.1f}"])


def main(way: str, first: str, *others: str) -> None:
    if way == "--cells":
        print(cells(Run(Path(first)), *others))
    else:
        runs = sorted(log.parent for log in Path(*others).glob("*/train.log"))
        print("\n".join(state(Run(run), first) for run in runs) or "no run has begun")


if __name__ == "__main__":
    main(*sys.argv[1:])
