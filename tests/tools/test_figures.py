"""The figures and tables of the documentation are what the commands on its pages draw and print today from the numbers beside them,
and its benchmarks run."""

from __future__ import annotations

import argparse
import csv
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
import torch
from support.commands import ROOT, run, succeed
from support.recipes import results_script

from fw_fairseq.tools.bench import __main__ as bench
from fw_fairseq.tools.plot import __main__ as plots

RESULTS = ROOT / "docs" / "results"
OF_LOGS = {f"docs/results/{name}_curves.svg" for name in ("retrieval", "retrieval_updates")}  # of runs whose logs are not kept
BY_HAND = {"docs/figures/architecture.svg", "docs/figures/generation.svg"}  # and by docs/figures/generation.py
SCRIPT = re.compile(r"docs/results/(figures|benchmarks)/\w+\.py")
IDS = re.compile(r"\b[mp][0-9a-f]{7,12}(_\w+)?\b")  # of the last digits of coordinates
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
BY = re.compile(r"Matplotlib v([\d.]+)")
TINY = {
    "layers": "--width 8 --heads 2 --batch 2 --length 4 --tokens 6 --windows 3 0",
    "translation": "--feature-maps elu --layers 1 --width 8 --heads 2 --ffn 8 --vocabulary 20 --lengths 1 3 --sentences 2 --beam 2",
    "sparse": "--sizes tiny --models dense '+ gated_delta for softmax' --contexts 1 3 --vocabulary 100 --steps 1",
}


def commands() -> list[tuple[str, list[str]]]:
    """Each page with the words of its commands that draw, print or measure. A command may go on in the next line."""
    found = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for line in re.sub(r" \\\n\s+", " ", page.read_text()).splitlines():
            words = shlex.split(line) if re.match(r"    (fw-plot|fw-bench|python docs/results)", line) else []
            found += [(page.relative_to(ROOT).as_posix(), words)] if words else []
    return found


COMMANDS = commands()
FIGURES = {
    word: words for _, words in COMMANDS for word in words if word.startswith("docs") and word.endswith(".svg")
}  # by figure the command that draws it


def call(words: list[str], monkeypatch) -> None:
    """Runs a command of a page in this process."""
    if words[0] == "python":
        monkeypatch.setattr(sys, "argv", words[1:])
        monkeypatch.syspath_prepend(str(Path(words[1]).resolve().parent))
        runpy.run_path(words[1], run_name="__main__")
    else:
        (plots if words[0] == "fw-plot" else bench).main(words[1:])


def test_every_figure_has_its_command():
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.svg")} == {*FIGURES} | BY_HAND


def test_the_picture_of_the_readme_is_of_the_report():
    command = [sys.executable, "docs/figures/generation.py", "docs/results/cost.json"]
    assert succeed(run(*command, cwd=ROOT)) == (ROOT / "docs" / "figures" / "generation.svg").read_text()


@pytest.mark.parametrize("name", sorted({*FIGURES} - OF_LOGS))
def test_a_figure_is_what_its_command_draws(name, tmp_path, monkeypatch):
    """To a hundredth of a typographical point."""
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.chdir(ROOT)
    kept = Path(name).read_text()
    if BY.search(kept)[1] != matplotlib.__version__:
        pytest.skip(f"the figures are of Matplotlib {BY.search(kept)[1]}")
    call([str(tmp_path / "x.svg") if word == name else word for word in FIGURES[name]], monkeypatch)
    ours, theirs = (IDS.sub("id", text) for text in ((tmp_path / "x.svg").read_text(), kept))
    assert NUMBER.sub("0", ours) == NUMBER.sub("0", theirs)
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (ours, theirs)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.01)


TABLES = [(page, words) for page, words in COMMANDS if "--table" in words and ("--out" not in words or "docs" in words[-1])]


@pytest.mark.parametrize("page, words", TABLES)
def test_a_table_is_what_its_command_prints(page, words, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    call(words[: words.index("--out")] if "--out" in words else words, monkeypatch)
    assert capsys.readouterr().out in Path(page).read_text() and len(TABLES) > 5


def test_rows_of_the_pages_of_models_trained_to_their_end(monkeypatch, capsys):
    """Their tables are printed with means and deviations of seeds."""
    monkeypatch.chdir(ROOT)
    for name in ("converged docs/results/convergence.txt", "translated docs/results/translated.txt"):
        call(["python", "docs/results/figures/convergence.py", *name.split(), "--table"], monkeypatch)
        _, _, *rows = capsys.readouterr().out.splitlines()
        assert len(rows) > 3 and all(" ± " in row for row in rows[:3])


def seeds_of(part: str) -> dict[str, dict[str, str]]:
    """The cells of tables of runs that have "seed 1, seed 2" or a dash, by the row, dropout and seed and by the column's title."""
    found: dict[str, dict[str, str]] = {}
    for table in re.findall(r"(?:^\|.*\n)+", part, re.MULTILINE):
        head, _, *rows = ([cell.strip(" `") for cell in row.strip("|\n").split("|")] for row in table.splitlines())
        for row in rows if "seeds 1 and 2" in " ".join(head) else ():
            model, _, dropout = row[0].replace("`", "").partition(", dropout ")
            for title, cell in zip(head, row):
                for seed, value in enumerate(cell.split(", "), 1) if ", " in cell and title != "row" else ():
                    if value != "-":
                        found.setdefault(f"{model} {dropout or 0.1} {seed}", {})[title.removesuffix(", seeds 1 and 2")] = value
    return found


def collected(name: str) -> dict[str, list[list[str]]]:
    """The words of a recipe's lines by the row, dropout and seed that they begin with."""
    found: dict[str, list[list[str]]] = {}
    for line in (RESULTS / name).read_text().splitlines():
        row, dropout, seed, *others = line.split()
        found.setdefault(f"{row} {dropout} {seed}", []).append(others)
    return found


def test_tables_of_models_trained_to_the_end_are_of_the_files_beside_them():
    """Each run of the files is on the page, and with it, but for conversions, its best validation and its test results."""
    page = (RESULTS / "convergence.md").read_text()
    languages, converted, translated = map(seeds_of, re.split("^## (?:Conversion|Translation)$", page, flags=re.MULTILINE))
    for name, runs in (("convergence", languages), ("converted", converted), ("translated", translated)):
        curves = collected(f"{name}_curves.txt")
        assert runs.keys() == curves.keys() and len(runs) > 10
        for run_, cells in runs.items():
            points = [(float(loss), float(perplexity)) for _, _, loss, perplexity in curves[run_]]
            assert name == "converted" or (min(points)[0], float(cells["best validation"])) in points, run_
    tested = {run_: tuple(line) for run_, [line] in collected("convergence.txt").items()}
    titles = ("test, segments", "test, sliding", "test, one stream")
    assert {run_: tuple(cells.get(title, "-") for title in titles) for run_, cells in languages.items()} == tested
    tested = {run_: tuple(line[1:]) for run_, [line] in collected("translated.txt").items()}
    titles = ("BLEU, detokenised", "BLEU, tokenised, compounds split")
    assert {run_: tuple(cells[title] for title in titles) for run_, cells in translated.items()} == tested


def test_curves_of_retrieval_have_the_looks_of_its_figures(tmp_path, monkeypatch):
    log = tmp_path / "setting2-20-gated_delta-dpfp_--dpfp-nu_1.log"
    log.write_text('... | INFO | valid | {"epoch": 1, "valid_loss": "8.5", "valid_num_updates": "1"}\n')
    monkeypatch.chdir(ROOT)
    call(["python", "docs/results/figures/retrieval.py", "curves", str(log), "--out", str(tmp_path / "x.svg")], monkeypatch)
    assert ">gated delta, DPFP-1<" in (tmp_path / "x.svg").read_text()


def test_finished_runs_stand_in_the_tables_of_publications(tmp_path, monkeypatch, capsys):
    """Perplexity of the best validation or of fairseq-eval-lm, or BLEU, beside what was published."""
    trained = (
        "... | INFO | fw_fairseq.models.fast_weight_lm | state size: 0.1311 million numbers for a sequence\n"
        '... | INFO | valid | {"epoch": 1, "valid_ppl": "40.5", "valid_bleu": "26.3", "valid_num_updates": "100"}\n'
        '... | INFO | train | {"epoch": 2, "train_num_updates": "250"}\n... {broken\n'
    )
    for run_ in ("runs/small-delta", "runs/dpfp2", "decay-16-phi"):
        (tmp_path / run_).mkdir(parents=True)
        (tmp_path / run_ / "train.log").write_text(trained)
    (tmp_path / "runs/small-delta/eval-test.log").write_text("Loss (base 2): 4.9000, Perplexity: 36.02\n")
    (tmp_path / "runs/dpfp2/bleu-test.txt").write_text("26.87 27.40\n")
    tables = results_script("figures/tables.py")
    tables.main("schlag2", str(tmp_path), str(tmp_path / "t.csv"))
    rows = list(csv.reader((tmp_path / "t.csv").open()))
    assert len(rows) == 11 and rows[3] == ["small", "Delta Network", "delta", "34.1", "", "35.5", "36.02", "250", "0.1311"]
    for name, row in (("schlag1", "| DPFP | 256 | 26.2 | 26.30 | 26.9 | 26.87 |"), ("mao2", "| Decay | 16 | 16.1 | 40.50 | 250 |")):
        tables.main(name, str(tmp_path))
        assert row in capsys.readouterr().out
    for name, table in tables.TABLES.items():
        for row in tables.read_rows(name, len(table.labels)):
            assert len(row.labels) == len(table.labels) and len(row.published) == len(table.columns)


@pytest.mark.parametrize("name", TINY)
def test_a_benchmark_of_the_pages(name, tmp_path, monkeypatch, capsys):
    """Its report has a time of everything, its table a row for it, and it can be drawn."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    words = ["python", str(RESULTS / "benchmarks" / f"{name}.py"), *shlex.split(TINY[name]), "--rounds", "1"]
    call([*words, "--json", "x.json"], monkeypatch)
    drawn = [str(RESULTS / "figures" / "cost.py"), name, "x.json", "--out", "x.svg"]
    call(["python", *drawn], monkeypatch)
    report, printed = json.loads(Path("x.json").read_text()), capsys.readouterr().out
    parts = {"layers": ["layers", "scans", "tokens"], "translation": ["decoding"], "sparse": ["products", "tokens"]}[name]
    rows = [row for part in parts for row in report[part]]
    assert len(rows) > 3 and all(row["seconds"] > 0 for row in rows) and all(f"{row['name']} |" in printed for row in rows)
    assert Path("x.svg").stat().st_size > 1000
    if name == "layers":
        call([*words, "--peers"], monkeypatch)
        assert "| sru, training | torch.nn.LSTM |" in capsys.readouterr().out


def test_the_commands_of_the_pages_make_their_reports_again():
    """With the defaults of what they leave out. The number of threads is the machine's, and there are more rules and mixers now."""
    reports = set()
    for _, words in COMMANDS:
        if "--json" not in words:
            continue
        parser, given = bench.build_parser(), words[1:]
        if words[0] == "python":
            parser, given = argparse.ArgumentParser(), words[2:]
            results_script(words[1].removeprefix("docs/results/")).add_arguments(parser)
            bench.add_common(parser)
        args = vars(parser.parse_args(given))
        before = json.loads((ROOT / args["json"]).read_text())["settings"]
        same = before.keys() & args.keys() - {"rules", "mixers", "threads"}
        assert {name: args[name] for name in same} == {name: before[name] for name in same}, words
        reports.add(ROOT / args["json"])
    text = (RESULTS / "gpu.md").read_text()
    kernels = {ROOT / name for name in re.findall(r"^    python recipes/gpu_check/speed\.py (\S+)$", text, re.MULTILINE)}
    assert reports | kernels == {*RESULTS.glob("*.json")} and torch.get_num_threads() > 0
