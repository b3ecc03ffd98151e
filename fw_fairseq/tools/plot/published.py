"""fw-plot tables: finished runs of the recipes in the publications' tables, measured beside published."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from pathlib import Path
from typing import NamedTuple

from ... import Mistake


class Row(NamedTuple):
    labels: tuple[str, ...]
    published: tuple[str, ...]
    run: str  # its folder, {} of the table's files; "": nothing here makes this row


class Table(NamedTuple):
    title: str
    labels: tuple[str, ...]
    columns: dict[str, str]  # what is measured, with the file it is read from: of fairseq-eval-lm, or a log of fairseq-train
    rows: tuple[Row, ...]
    log: str  # of fairseq-train


EVALUATED = {"valid": "runs/{}/eval-valid.log", "test": "runs/{}/eval-test.log"}
WIKITEXT103_LOG, LABELS = "runs/{}/train.log", ("size", "model", "rule")
TABLES = {
    "schlag2": Table(
        "Schlag et al. 2021, table 2: update rules on WikiText-103",
        LABELS,
        EVALUATED,
        tuple(
            Row((size, *labels), published[2 * i : 2 * i + 2], f"{size}-{run}")
            for i, size in enumerate(("small", "medium"))
            for labels, run, published in (
                (("Transformer", ""), "transformer", ("33.0", "34.1", "27.9", "29.6")),
                (("Linear Transformer", "sum"), "linear", ("37.1", "38.3", "31.1", "33.0")),
                (("Delta Network", "delta"), "delta", ("34.1", "35.5", "29.7", "31.5")),
                (("Performer", "sum"), "performer", ("39.0", "39.6", "32.2", "33.8")),
                (("Performer", "delta"), "performer_delta", ("36.1", "37.2", "30.0", "31.8")),
            )
        ),
        WIKITEXT103_LOG,
    ),
    "schlag3": Table(
        "Schlag et al. 2021, table 3: positions and attention normalisation, delta rule, medium",
        ("positions", "attention norm"),
        EVALUATED,
        (
            Row(("yes", "yes"), ("30.4", "32.1"), "medium-delta_norm"),
            Row(("no", "yes"), ("29.2", "31.2"), "medium-delta_nopos_norm"),
            Row(("yes", "no"), ("29.7", "31.5"), "medium-delta"),
            Row(("no", "no"), ("28.1", "31.1"), "medium-delta_nopos"),
        ),
        WIKITEXT103_LOG,
    ),
    "schlag4": Table(
        "Schlag et al. 2021, table 4: WikiText-103 without truncating context, medium",
        ("model", "published state size (millions)"),
        {name: file.replace(".log", "{memory}.log") for name, file in EVALUATED.items()},
        (
            Row(("Linear Transformer", "0.13"), (">260", ">260"), "medium-linear_stream"),
            Row(("Delta Network", "0.13"), ("27.8", "29.4"), "medium-delta_stream"),
            Row(("Transformer-XL", "0.13"), ("65.7", "65.5"), "medium-transformer_xl_stream:15"),
            Row(("Transformer-XL", "1.05"), ("29.3", "30.1"), "medium-transformer_xl_stream:127"),
            Row(("Transformer-XL", "2.10"), ("26.4", "27.4"), "medium-transformer_xl_stream:255"),
            Row(("Transformer-XL", "6.29"), ("24.6", "25.5"), "medium-transformer_xl_stream:767"),
        ),
        WIKITEXT103_LOG,
    ),
    "schlag5": Table(
        "Schlag et al. 2021, table 5: WikiText-103 below capacity, small",
        ("model", "rule"),
        EVALUATED,
        (
            Row(("Transformer", ""), ("33.0", "34.1"), "small-transformer"),
            Row(("Performer", "sum"), ("38.0", "38.8"), "small-performer16"),
            Row(("Performer", "delta"), ("36.0", "37.0"), "small-performer16_delta"),
            Row(("DPFP", "sum"), ("37.7", "38.8"), "small-dpfp1"),
            Row(("DPFP", "delta"), ("33.9", "35.0"), "small-dpfp1_delta"),
        ),
        WIKITEXT103_LOG,
    ),
    "mao1": Table(
        "Mao 2022, table 1: GPT-2 converted, m = 4; norm: without attention norm; phi: without feature map, too",
        ("rule", "configuration"),
        {"best valid": "{}/train.log"},
        tuple(
            Row((rule, configuration), (published,), f"{run}-4-{configuration}")
            for rule, run, values in (
                ("Add", "sum", ("22.6", "diverged", "20.0")),
                ("Delta", "delta", ("21.6", "20.1", "diverged")),
                ("Gated", "gated", ("diverged", "19.7", "17.1")),
                ("Decay", "decay", ("", "18.8", "17.1")),
            )
            for configuration, published in zip(("baseline", "norm", "phi"), values)
            if published
        ),
        "{}/train.log",
    ),
    "mao2": Table(
        "Mao 2022, table 2: GPT-2 converted, larger m, no feature map and no norm",
        ("rule", "m"),
        {"best valid": "{}/train.log"},
        (
            Row(("GPT-2", ""), ("14.5",), "softmax"),
            Row(("Local attention", "32 tokens"), ("19.4",), "local_attention"),
            Row(("Gated", "16"), ("16.8",), "gated-16-phi"),
            Row(("Decay", "16"), ("16.1",), "decay-16-phi"),
            Row(("Gated", "32"), ("16.4",), "gated-32-phi"),
            Row(("Decay", "32"), ("14.6",), "decay-32-phi"),
        ),
        "{}/train.log",
    ),
    "mao3": Table(
        "Mao 2022, table 3: the model of Baevski and Auli 2019 on WikiText-103, test, context 0 and 480",
        ("model", "memory"),
        {"0": "eval/{}-0.log", "480": "eval/{}-480.log"},
        (
            Row(("Base", ""), ("20.5", "19.0"), "pretrained"),
            Row(("Linformer", "2 x 64"), ("27.2", "30.7"), "linformer-64"),
            Row(("ABC-MLP", "2 x 32"), ("21.9", "20.5"), "abc-32"),
            Row(("Decay", "32"), ("22.1", "20.7"), "decay-32"),
            Row(("Decay", "64"), ("21.9", "20.5"), "decay-64"),
        ),
        "{}/train.log",
    ),
}


def add_arguments(parser) -> None:
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("folder", type=Path, help="OUT of recipes/wikitext103 (schlag), gpt2 (mao1, mao2) or baevski_auli (mao3)")
    parser.add_argument("--out", type=Path, nargs="+", default=[], help="files to write, .md or .csv; prints Markdown if left out")


def main(args) -> None:
    """Each file appears whole or not at all."""
    table = TABLES[args.table]
    lines = collect(table, args.folder)
    if not args.out:
        print(markdown(table.title, lines), end="")
    for path in args.out:
        if path.suffix not in (".md", ".csv"):
            raise Mistake(f"--out is {path}; it must end in .md or .csv")
    for path in args.out:
        part = path.with_name(f".{path.name}.part")
        part.write_text(markdown(table.title, lines) if path.suffix == ".md" else comma_separated(lines))
        os.replace(part, path)
        print(path)


def collect(table: Table, folder: Path) -> list[list[str]]:
    """The head and a line for each row; what was not measured is empty."""
    head = [*table.labels, *(f"{name}, {kind}" for name in table.columns for kind in ("published", "measured"))]
    lines, sought = [[*head, "updates", "state size (millions)"]], []
    for row in table.rows:
        run, _, memory = row.run.partition(":")
        files = [folder / name.format(run, memory=memory and f"-memory{memory}") for name in table.columns.values()]
        measured = [perplexity(file) for file in files]
        log = folder / table.log.format(run)
        updates, state = read_training(log) if any(measured) else ("", "")
        if memory and any(measured):
            _, state = read_training(files[-1])
        cells = [cell for pair in zip(row.published, measured) for cell in pair]
        lines.append([*row.labels, *cells, updates, state])
        sought += files
    if not any(cell for line in lines[1:] for cell in line[len(table.labels) + 1 : -2 : 2]):
        raise Mistake(f"{folder} has no finished run of this table; none of its files is there, such as {sought[-1]}")
    return lines


def perplexity(file: Path) -> str:
    """What fairseq-eval-lm printed last, or the best of validation in a log of fairseq-train --log-format json."""
    text = file.read_text() if file.exists() else ""
    if found := re.findall(r"Perplexity: ([\d.]+|inf|nan)", text):
        return found[-1]
    valid = [float(entry["valid_ppl"]) for entry in entries(text) if entry.get("valid_ppl")]
    return f"{min(valid):.2f}" if valid else ""


def read_training(file: Path) -> tuple[str, str]:
    """Updates and the state size in millions."""
    text = file.read_text() if file.exists() else ""
    updates = [int(entry[name]) for entry in entries(text) for name in ("num_updates", "train_num_updates") if name in entry]
    state = re.findall(r"state size: ([\d.e+-]+) million", text)
    return str(max(updates)) if updates else "", state[-1] if state else ""


def entries(text: str) -> list[dict]:
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line[line.index("{") :]))
        except ValueError:  # no brace, or no JSON
            continue
    return [entry for entry in found if isinstance(entry, dict)]


def markdown(title: str, lines: list[list[str]]) -> str:
    rows = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([title, "", rows[0], "|" + "---|" * len(lines[0]), *rows[1:]]) + "\n"


def comma_separated(lines: list[list[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()
