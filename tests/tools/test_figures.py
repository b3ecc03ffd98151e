"""The figures of the documentation are what the commands on its pages draw today from the numbers beside them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from support.commands import ROOT, run, succeed

from fw_fairseq.tools.bench import __main__ as bench
from fw_fairseq.tools.plot import __main__ as plots

OF_LOGS = {f"docs/results/{name}_curves.svg" for name in ("retrieval", "retrieval_updates")}  # of runs whose logs are not kept
KEPT = {f"docs/results/{name}.svg" for name in ("convergence", "converted")}  # of logs beside them
BY_HAND = {"docs/figures/architecture.svg", "docs/figures/generation.svg"}  # and by docs/figures/generation.py
IDS = re.compile(r"\b[mp][0-9a-f]{7,12}(_\w+)?\b")  # of the last digits of coordinates
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")
BY = re.compile(r"Matplotlib v([\d.]+)")


def lines_of_commands() -> list[tuple[str, list[str]]]:
    """Each page with the words of its commands that draw or print. A command may go on in the next line."""
    return [
        (page.relative_to(ROOT).as_posix(), line.split())
        for page in sorted((ROOT / "docs").rglob("*.md"))
        for line in re.sub(r" \\\n\s+", " ", page.read_text()).splitlines()
        if line.split()[:1] in (["fw-plot"], ["fw-bench"])
    ]


def commands() -> dict[str, list[str]]:
    """By figure the command that draws it."""
    found = {}
    for _, words in lines_of_commands():
        if out := re.search(r"--(?:out|figure) (docs/\S+\.svg)", " ".join(words)):
            found[out[1]] = words
    return found


COMMANDS = commands()


def test_every_figure_has_its_command():
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.svg")} == {*COMMANDS} | BY_HAND
    assert {name for name, words in COMMANDS.items() if words[1] == "curves"} - KEPT == OF_LOGS


def test_the_picture_of_the_readme_is_of_the_report():
    command = [sys.executable, "docs/figures/generation.py", "docs/results/cost.json"]
    assert succeed(run(*command, cwd=ROOT)) == (ROOT / "docs" / "figures" / "generation.svg").read_text()


@pytest.mark.parametrize("name", sorted({*COMMANDS} - OF_LOGS))
def test_a_figure_is_what_its_command_draws(name, tmp_path, monkeypatch):
    """To a hundredth of a typographical point."""
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.chdir(ROOT)
    kept, (program, command, *given) = Path(name).read_text(), COMMANDS[name]
    if BY.search(kept)[1] != matplotlib.__version__:
        pytest.skip(f"the figures are of Matplotlib {BY.search(kept)[1]}")
    drawn = tmp_path / "x.svg"
    if program == "fw-bench":
        bench.COMMANDS[command].module.draw(json.loads(Path(given[given.index("--json") + 1]).read_text()), drawn)
    else:
        given[given.index("--out") + 1] = str(drawn)
        plots.main([command, *given])
    ours, theirs = (IDS.sub("id", text) for text in (drawn.read_text(), kept))
    assert NUMBER.sub("0", ours) == NUMBER.sub("0", theirs)
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (ours, theirs)]
    assert numbers[0] == pytest.approx(numbers[1], abs=0.01)


def tables() -> list[tuple[str, list[str]]]:
    """Pages, and the commands that print a table of theirs."""
    return [
        (page, words[1 : words.index("--out")] if "--out" in words else words[1:])
        for page, words in lines_of_commands()
        if words[0] == "fw-plot" and "--table" in words and ("--out" not in words or "docs" in words[-1])
    ]


TABLES = tables()


def test_pages_have_tables_of_commands():
    assert {words[0] for _, words in TABLES} == {"capacity", "updates", "recall", "tracking", "parts"}


@pytest.mark.parametrize("page, words", TABLES)
def test_a_table_is_what_its_command_prints(page, words, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    plots.main(words)
    assert capsys.readouterr().out in Path(page).read_text()
