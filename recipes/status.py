"""Says how runs are doing, from what they have written.

python status.py FOLDER...                       a table of all runs in these folders
python status.py --check RUN UPDATES EPOCHS      what a trial has measured, and how long all updates or epochs would take
python status.py --cells RUN X...                the cells of a table: best validation perplexity, X..., epochs, hours
"""

from __future__ import annotations

import fcntl
import re
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from fw_fairseq.tools.plot.logs import read_line

HEAD = ("run", "state", "update", "perplexity", "best validation", "words/s", "hours left", "last line", "disk")
START = "fairseq_cli.train | task: "  # near the beginning of each part of the log
GB = 1e9


class Run:
    """The log and the files of one run; a run that was stopped and resumed has written one log."""

    def __init__(self, folder: Path):
        self.folder, self.name = folder, folder.name
        self.log = folder / "train.log"
        self.text = self.log.read_text(encoding="utf-8", errors="replace")
        entries = [entry for entry in map(read_line, self.text.splitlines()) if entry]
        self.steps = [entry for entry in entries if "num_updates" in entry]
        self.validations = [entry for entry in entries if "valid_loss" in entry]
        self.seconds = {int(entry["epoch"]): float(entry["train_train_wall"]) for entry in entries if "train_train_wall" in entry}

    @property
    def best(self) -> tuple[int, float] | None:
        """The epoch of the lowest validation loss, whose checkpoint is the best one, and its perplexity."""
        found = [(float(entry["valid_loss"]), float(entry["valid_ppl"]), int(entry["epoch"])) for entry in self.validations]
        return min(found)[:0:-1] if found else None

    @property
    def epochs(self) -> int:
        """How many epochs there are."""
        return len({int(entry["epoch"]) for entry in self.validations})

    @property
    def per_epoch(self) -> float | None:
        """The updates of an epoch."""
        if found := re.findall(r"epoch \d+: +\d+ / (\d+) ", self.text):
            return float(found[-1])
        last = self.steps[-1] if self.steps else {}
        return float(last["num_updates"]) / float(last["update"]) if float(last.get("update", 0)) else None

    def setting(self, name: str) -> float:
        """A number among the options of the command that the log, or its last part, begins with; 0 where it is not there."""
        found = re.findall(rf" --{name.replace('_', '-')}[ =]([\d.]+)", self.text)
        return float(found[-1]) if found else 0

    def most(self, updates: float, epochs: float) -> float | None:
        """How many updates the run makes, by its limits, of which 0 is none."""
        limits = [updates, epochs * (self.per_epoch or 0)]
        return min(filter(None, limits), default=None)

    @property
    def state(self) -> str:
        last = self.text.rpartition(START)[-1]
        if is_locked(self.folder / ".lock"):
            return "running"
        if "done training" in last:
            return "finished"
        return "stopped" if "stopped the run after update" in last else "interrupted"

    @property
    def size(self) -> int:
        """Bytes on the disk; links to one file count once."""
        return sum({(x.st_ino, x.st_dev): x.st_size for x in (path.stat() for path in self.folder.rglob("*"))}.values())


def is_locked(path: Path) -> bool:
    """Whether a process trains in the folder of this lock."""
    try:
        with path.open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def row(run: Run, root: Path) -> list[str]:
    last = run.steps[-1] if run.steps else {}
    update, most = int(float(last.get("num_updates", 0))), run.most(run.setting("max_update"), run.setting("max_epoch"))
    left = ""
    if most and float(last.get("ups", 0)) and run.state != "finished":
        left = f"{max(0.0, most - update) / float(last['ups']) / 3600:.1f}"
    scores = [float(entry["valid_bleu"]) for entry in run.validations if "valid_bleu" in entry]
    best = f"{run.best[1]:.2f} (epoch {run.best[0]})" if run.best else ""
    return [
        str(run.folder.relative_to(root) if run.folder != root else run.name),
        run.state,
        f"{update:,}" + (f" of {most:,.0f}" if most else ""),
        str(last.get("ppl", "")),
        f"BLEU {max(scores):.2f}" if scores else best,
        str(last.get("wps", "")),
        left,
        ago(time.time() - run.log.stat().st_mtime),
        amount(run.size),
    ]


def amount(size: float) -> str:
    return f"{size / GB:.2f} GB" if size >= GB / 10 else f"{size / 1e6:.1f} MB"


def ago(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} seconds ago"


def table(lines: Iterable[Iterable[str]]) -> str:
    lines = [list(line) for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines)


def show(folders: list[str]) -> str:
    found = [(path.parent, Path(folder)) for folder in folders for path in sorted(Path(folder).rglob("train.log"))]
    return table([HEAD, *(row(Run(run), root) for run, root in found)]) if found else "no run has begun"


def checked(folder: Path, updates: float, epochs: float) -> str:
    """What the trial in this folder says of the run whose limits these are; the first steps are slower than the others."""
    run = Run(folder)
    steps = run.steps[1:] or run.steps
    if not steps:
        sys.exit(f"status.py: {run.log} has no update")
    words, each = (statistics.median(float(step[name]) for step in steps) for name in ("wps", "ups"))
    size = (folder / "checkpoint_last.pt").stat().st_size
    most = run.most(updates, epochs)
    takes = f"; {most:,.0f} updates take {most / each / 3600:.1f} hours" if most else ""
    memory = f"{amount(float((folder / 'memory').read_text()) * 1024)} of memory"
    if free := [float(step["gb_free"]) for step in run.steps if "gb_free" in step]:
        import torch

        whole = torch.cuda.get_device_properties(0).total_memory
        memory += f", {amount(whole - min(free) * 1024**3)} of {amount(whole)} of a GPU's"
    name = run.name.removesuffix(".check")
    disk = f"{amount(size)} for a checkpoint, {amount(3 * size)} for the run: the best, the last, and one being written"
    return f"{name}: {words:,.0f} words/s, {1 / each:.3g} seconds an update{takes}\n{name}: {memory}; {disk}"


def cells(run: Run, *values: str) -> str:
    if run.best is None:
        sys.exit(f"status.py: the log of {run.name} has no validation loss")
    return " | ".join([f"{run.best[1]:.2f}", *values, str(run.epochs), f"{sum(run.seconds.values()) / 3600:.1f}"])


def main(first: str, *others: str) -> None:
    if first == "--cells":
        print(cells(Run(Path(others[0])), *others[1:]))
    elif first == "--check":
        print(checked(Path(others[0]), *map(float, others[1:])))
    else:
        print(show([first, *others]))


if __name__ == "__main__":
    main(*sys.argv[1:])
