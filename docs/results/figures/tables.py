"""Finished runs of the recipes in the tables of the publications, measured beside published: tables.py NAME OUT [FILE.md FILE.csv]

OUT is that of recipes/wmt14 (schlag1), wikitext103 (other schlag), gpt2 (mao1, mao2) or baevski_auli (mao3).
"""

from __future__ import annotations

import csv
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from published import read_rows

from fw_fairseq.tools.plot.logs import number, read_line


def values(text: str, *names: str) -> list[float]:
    """Returns what a log of fairseq-train has under these names."""
    found = (number(entry.get(name)) for entry in map(read_line, text.splitlines()) for name in names)
    return [value for value in found if value is not None]


def perplexity(text: str) -> str:
    """Returns the last perplexity that fairseq-eval-lm printed, or the best of validation in a log of fairseq-train."""
    if found := re.findall(r"Perplexity: ([\d.]+|inf|nan)", text):
        return found[-1]
    valid = values(text, "valid_ppl")
    return f"{min(valid, key=lambda value: (math.isnan(value), value)):.2f}" if valid else ""


def bleu(text: str) -> str:
    """Returns the first number of a file of recipes/wmt14/eval.sh, or the best BLEU of validation in a log of fairseq-train."""
    if found := re.fullmatch(r"([\d.]+) [\d.]+\s*", text):
        return found[1]
    valid = [value for value in values(text, "valid_bleu") if not math.isnan(value)]
    return f"{max(valid):.2f}" if valid else ""


class Table(NamedTuple):
    """A table of a publication; its numbers are in published/NAME.csv."""

    title: str
    labels: tuple[str, ...]
    columns: dict[str, str]  # what is measured, with the file it is read from: of fairseq-eval-lm, or a log of fairseq-train
    log: str = "runs/{}/train.log"  # of fairseq-train
    read: Callable[[str], str] = perplexity


CONVERTED = "{}/train.log"
EVALUATED = {"valid": "runs/{}/eval-valid.log", "test": "runs/{}/eval-test.log"}
BY_MEMORY = {name: file.replace(".log", "{memory}.log") for name, file in EVALUATED.items()}
BEST, CONTEXTS = {"best valid": CONVERTED}, {"0": "eval/{}-0.log", "480": "eval/{}-480.log"}
SCHLAG, MAO = "Schlag et al. 2021, table", "Mao 2022, table"
TABLES = {
    "schlag1": Table(
        f"{SCHLAG} 1: BLEU of WMT14 English-German; d_dot: features of queries and keys per head", ("model", "d_dot"),
        {"valid": "runs/{}/train.log", "test": "runs/{}/bleu-test.txt"}, read=bleu,
    ),
    "schlag2": Table(f"{SCHLAG} 2: update rules on WikiText-103", ("size", "model", "rule"), EVALUATED),
    "schlag3": Table(
        f"{SCHLAG} 3: positions and attention normalisation, delta rule, medium", ("positions", "attention norm"), EVALUATED
    ),
    "schlag4": Table(
        f"{SCHLAG} 4: WikiText-103 without truncating context, medium", ("model", "published state size (millions)"), BY_MEMORY
    ),
    "schlag5": Table(f"{SCHLAG} 5: WikiText-103 below capacity, small", ("model", "rule"), EVALUATED),
    "mao1": Table(
        f"{MAO} 1: GPT-2 converted, m = 4; norm: without attention norm; phi: without feature map, too", ("rule", "configuration"),
        BEST, CONVERTED,
    ),
    "mao2": Table(f"{MAO} 2: GPT-2 converted, larger m, no feature map and no norm", ("rule", "m"), BEST, CONVERTED),
    "mao3": Table(
        f"{MAO} 3: the model of Baevski and Auli 2019 on WikiText-103, test, context 0 and 480", ("model", "memory"), CONTEXTS,
        CONVERTED,
    ),
}  # fmt: skip


def collect(name: str, folder: Path) -> list[list[str]]:
    """Returns the head and a line for each row; cells that were not measured are empty."""
    table = TABLES[name]
    head = [*table.labels, *(f"{column}, {kind}" for column in table.columns for kind in ("published", "measured"))]
    lines, any_measured = [[*head, "updates", "state size (millions)"]], False
    for row in read_rows(name, len(table.labels)):
        run, _, memory = row.run.partition(":")
        texts = [text_of(folder / file.format(run, memory=memory and f"-memory{memory}")) for file in table.columns.values()]
        measured = [table.read(text) for text in texts]
        updates = state = ""
        if any(measured):
            any_measured = True
            updates, state = read_training(text_of(folder / table.log.format(run)))
            state = read_training(texts[-1])[1] if memory else state
        lines.append([*row.labels, *(cell for pair in zip(row.published, measured) for cell in pair), updates, state])
    return lines if any_measured else sys.exit(f"{folder} has no finished run of {name}")


def text_of(file: Path) -> str:
    """Returns nothing for a file that is not there."""
    return file.read_text() if file.exists() else ""


def read_training(text: str) -> tuple[str, str]:
    """Returns the number of updates and the state size in millions."""
    updates = [int(found) for found in re.findall(r"\bnum_updates(?:=| )(\d+)", text)]  # simple logs; the others are JSON
    updates += [int(at) for at in values(text, "num_updates", "train_num_updates") if math.isfinite(at)]
    state = re.findall(r"state size: ([\d.e+-]+) million", text)
    return str(max(updates)) if updates else "", state[-1] if state else ""


def markdown(title: str, lines: list[list[str]]) -> str:
    """Returns the table below its title."""
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([title, "", rows[0], "|" + "---|" * len(lines[0]), *rows[1:]]) + "\n"


def main(name: str, folder: str, *files: str) -> None:
    """Prints the table, or writes it to the files."""
    lines = collect(name, Path(folder))
    if not files:
        print(markdown(TABLES[name].title, lines), end="")
    for file in map(Path, files):
        if file.suffix == ".csv":
            with file.open("w") as text:
                csv.writer(text, lineterminator="\n").writerows(lines)
        else:
            file.write_text(markdown(TABLES[name].title, lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
