"""fw-plot tables: finished runs of the recipes in the publications' tables, measured beside published."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ...errors import Mistake
from ...files import read_text, write_atomically
from ..command import check_outputs
from .logs import number, read_line
from .published import Row, read_rows


def perplexity(file: Path) -> str:
    """Returns the last perplexity that fairseq-eval-lm printed, or the best of validation in a log of fairseq-train."""
    text = text_of(file)
    if found := re.findall(r"Perplexity: ([\d.]+|inf|nan)", text):
        return found[-1]
    valid = [value for entry in entries(text) if (value := number(entry.get("valid_ppl"))) is not None]
    return f"{min(valid, key=lambda value: (math.isnan(value), value)):.2f}" if valid else ""


def bleu(file: Path) -> str:
    """Returns the first number of a file of recipes/wmt14/eval.sh, or the best BLEU of validation in a log of fairseq-train."""
    text = text_of(file)
    if found := re.fullmatch(r"([\d.]+) [\d.]+\s*", text):
        return found[1]
    valid = [value for entry in entries(text) if (value := number(entry.get("valid_bleu"))) is not None and not math.isnan(value)]
    return f"{max(valid):.2f}" if valid else ""


class Table(NamedTuple):
    """A table of a publication; its numbers are in data/NAME.csv."""

    name: str
    title: str
    labels: tuple[str, ...]
    columns: dict[str, str]  # what is measured, with the file it is read from: of fairseq-eval-lm, or a log of fairseq-train
    log: str  # of fairseq-train
    read: Callable[[Path], str] = perplexity
    measure: str = "perplexity"

    @property
    def rows(self) -> list[Row]:
        return read_rows(self.name, len(self.labels))


RUN_LOG, CONVERTED_LOG = "runs/{}/train.log", "{}/train.log"
EVALUATED = {"valid": "runs/{}/eval-valid.log", "test": "runs/{}/eval-test.log"}
EVALUATED_BY_MEMORY = {name: file.replace(".log", "{memory}.log") for name, file in EVALUATED.items()}
BEST, CONTEXTS = {"best valid": CONVERTED_LOG}, {"0": "eval/{}-0.log", "480": "eval/{}-480.log"}
TABLES = {
    table.name: table
    for table in (
        Table(
            "schlag1",
            "Schlag et al. 2021, table 1: BLEU of WMT14 English-German; d_dot: features of queries and keys per head",
            ("model", "d_dot"),
            {"valid": "runs/{}/train.log", "test": "runs/{}/bleu-test.txt"},
            RUN_LOG,
            bleu,
            "BLEU",
        ),
        Table(
            "schlag2",
            "Schlag et al. 2021, table 2: update rules on WikiText-103",
            ("size", "model", "rule"),
            EVALUATED,
            RUN_LOG,
        ),
        Table(
            "schlag3",
            "Schlag et al. 2021, table 3: positions and attention normalisation, delta rule, medium",
            ("positions", "attention norm"),
            EVALUATED,
            RUN_LOG,
        ),
        Table(
            "schlag4",
            "Schlag et al. 2021, table 4: WikiText-103 without truncating context, medium",
            ("model", "published state size (millions)"),
            EVALUATED_BY_MEMORY,
            RUN_LOG,
        ),
        Table(
            "schlag5",
            "Schlag et al. 2021, table 5: WikiText-103 below capacity, small",
            ("model", "rule"),
            EVALUATED,
            RUN_LOG,
        ),
        Table(
            "mao1",
            "Mao 2022, table 1: GPT-2 converted, m = 4; norm: without attention norm; phi: without feature map, too",
            ("rule", "configuration"),
            BEST,
            CONVERTED_LOG,
        ),
        Table(
            "mao2",
            "Mao 2022, table 2: GPT-2 converted, larger m, no feature map and no norm",
            ("rule", "m"),
            BEST,
            CONVERTED_LOG,
        ),
        Table(
            "mao3",
            "Mao 2022, table 3: the model of Baevski and Auli 2019 on WikiText-103, test, context 0 and 480",
            ("model", "memory"),
            CONTEXTS,
            CONVERTED_LOG,
        ),
    )
}


def add_arguments(parser) -> None:
    parser.add_argument("table", choices=TABLES)
    parser.add_argument(
        "folder", type=Path, help="OUT of recipes/wmt14 (schlag1), wikitext103 (other schlag), gpt2 (mao1, 2) or baevski_auli"
    )
    parser.add_argument("--out", type=Path, nargs="+", default=[], help="files to write, .md or .csv; prints Markdown if left out")


def main(args) -> None:
    """Prints the table, or writes it to the files of --out."""
    table = TABLES[args.table]
    for path in args.out:
        if path.suffix not in (".md", ".csv"):
            raise Mistake(f"--out is {path}; it must end in .md or .csv")
    check_outputs(("--out", path) for path in args.out)
    lines = collect(table, args.folder)
    if not args.out:
        print(markdown(table.title, lines), end="")
    for path in args.out:
        text = markdown(table.title, lines) if path.suffix == ".md" else comma_separated(lines)
        write_atomically(path, lambda part: part.write_text(text))  # noqa: B023
        print(path)


def collect(table: Table, folder: Path) -> list[list[str]]:
    """Returns the head and a line for each row; cells that were not measured are empty."""
    if not folder.is_dir():
        raise Mistake(f"FOLDER is {folder}, which is no folder; it must be OUT of the recipe that trained the runs")
    head = [*table.labels, *(f"{name}, {kind}" for name in table.columns for kind in ("published", "measured"))]
    lines, sought = [[*head, "updates", "state size (millions)"]], []
    for row in table.rows:
        run, _, memory = row.run.partition(":")
        files = [folder / name.format(run, memory=memory and f"-memory{memory}") for name in table.columns.values()]
        measured = [table.read(file) for file in files]
        log = folder / table.log.format(run)
        updates, state = read_training(log) if any(measured) else ("", "")
        if memory and any(measured):
            _, state = read_training(files[-1])
        cells = [cell for pair in zip(row.published, measured) for cell in pair]
        lines.append([*row.labels, *cells, updates, state])
        sought += files
    if not any(cell for line in lines[1:] for cell in line[len(table.labels) + 1 : -2 : 2]):
        there = [file for file in sought if file.exists()]
        why = f"{there[-1]} is there and holds no {table.measure}" if there else f"none of its files is there, such as {sought[-1]}"
        raise Mistake(f"{folder} has no finished run of this table; {why}")
    return lines


def text_of(file: Path) -> str:
    return read_text(file, "a log") if file.exists() else ""


def read_training(file: Path) -> tuple[str, str]:
    """Returns the number of updates and the state size in millions."""
    text = text_of(file)
    updates = [int(number) for number in re.findall(r"\bnum_updates(?:=| )(\d+)", text)]  # simple logs; the others are JSON
    logged = (number(entry.get(name)) for entry in entries(text) for name in ("num_updates", "train_num_updates"))
    updates += [int(at) for at in logged if at is not None and math.isfinite(at)]
    state = re.findall(r"state size: ([\d.e+-]+) million", text)
    return str(max(updates)) if updates else "", state[-1] if state else ""


def entries(text: str) -> list[dict]:
    return [entry for line in text.splitlines() if (entry := read_line(line))]


def markdown(title: str, lines: list[list[str]]) -> str:
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([title, "", rows[0], "|" + "---|" * len(lines[0]), *rows[1:]]) + "\n"


def comma_separated(lines: list[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()
