"""Marks in the code that say which tests run it, and the plugin of pytest with which they are written.

``marked`` puts a call of ``mark(NUMBER)`` before the statement of each mutant. While the tests run, in their own processes and in
the commands that they start, each call writes its number and the test's name, once, into the folder that MUTATION_MARKS names.
"""

from __future__ import annotations

import ast
import collections
import itertools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

MODULE = '''"""Written by tests/mutation."""
import os
import time

FOLDER, WORKER = os.environ.get("MUTATION_MARKS"), os.environ.get("PYTEST_XDIST_WORKER", "")
written, read, name = set(), -1.0, None


def current():
    """The name of the test that runs, which a command reads from a file, 20 times a second at most."""
    global read, name
    if "PYTEST_CURRENT_TEST" in os.environ:
        return os.environ["PYTEST_CURRENT_TEST"]
    now = time.monotonic()
    if now - read >= 0.05:
        read, name = now, None
        try:
            with open(os.path.join(FOLDER, "current-" + WORKER)) as file:
                name = file.read()
        except OSError:
            pass
    return name


def mark(number):
    test = FOLDER and current()
    if test and (number, test) not in written:
        written.add((number, test))
        place = os.open(os.path.join(FOLDER, f"marks-{os.getpid()}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(place, f"{number}\\t{test}\\n".encode())
        os.close(place)
'''
STATEMENTS = "body", "orelse", "finalbody"
ALL, NEW = "reports.json", "new.json"  # of the tests of all runs, and of the last run


class Run(NamedTuple):
    """What a run of the tests told: the seconds of each test that passed, and the tests that run each mutant."""

    seconds: dict[str, float]
    tests: dict[int, list[str]]


def marked(text: str, lines: dict[int, int]) -> str:
    """Returns the source with a mark of each number before the statement of its line; for a line that runs when the module is
    imported, where each of the module's functions begins."""
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    before: dict[int, list[int]] = collections.defaultdict(list)  # the id of a statement
    for number, line in lines.items():
        inside = [node for node in functions if node.body[0].lineno <= line <= node.end_lineno]
        if inside:
            places = [statement_of(max(inside, key=lambda node: node.lineno), line)]
        else:
            places = [node.body[first_of(node)] for node in functions if first_of(node) < len(node.body)]
        for place in places:
            before[id(place)].append(number)
    for node in list(ast.walk(tree)):
        for name in STATEMENTS:
            statements = getattr(node, name, None)
            if isinstance(statements, list):
                setattr(node, name, [new for old in statements for new in [*map(call_of, before[id(old)]), old]])
    after = next((i for i, node in enumerate(tree.body) if not is_first(node)), len(tree.body))
    tree.body.insert(after, ast.parse("from mutation_mark import mark as mutation_mark").body[0])
    return ast.unparse(ast.fix_missing_locations(tree))


def statement_of(function: ast.AST, line: int) -> ast.stmt:
    """The innermost statement of the line, before which a call can stand."""
    inside = [node for node in ast.walk(function) if isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno]
    inside = [node for node in inside if node is not function and not is_text(node)]
    return max(inside, key=lambda node: (node.lineno, -(node.end_lineno or 0))) if inside else function.body[-1]


def call_of(number: int) -> ast.stmt:
    return ast.parse(f"mutation_mark({number})").body[0]


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_first(node: ast.AST) -> bool:
    return is_text(node) or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


def first_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The number of the first statement after the docstring."""
    return int(is_text(function.body[0]))


def read(folder: Path) -> Run:
    """What a run of the tests has written into the folder. A fixture's marks count for all tests of its file."""
    reports = json.loads((folder / ALL).read_text())
    seconds = {name: report["seconds"] for name, report in reports.items() if report["outcomes"] == ["passed"]}
    files: dict[str, list[str]] = collections.defaultdict(list)
    for name in seconds:
        files[name.partition("::")[0]].append(name)
    found: dict[int, set[str]] = collections.defaultdict(set)
    for line in (line for file in folder.glob("marks-*") for line in file.read_text().splitlines()):
        number, _, test = line.partition("\t")
        name, _, phase = test.rpartition(" ")
        found[int(number)] |= {name} if phase == "(call)" else {name, *files[name.partition("::")[0]]}
    return Run(seconds, {number: sorted(names & seconds.keys()) for number, names in found.items()})


def drop_reports(folder: Path, files: Iterable[str]) -> None:
    """Forgets the tests of these files."""
    if (folder / ALL).exists():
        reports = json.loads((folder / ALL).read_text())
        kept = {name: report for name, report in reports.items() if name.partition("::")[0] not in {*files}}
        (folder / ALL).write_text(json.dumps(kept))


def add_reports(folder: Path) -> None:
    """Puts the reports of the last run beside those of earlier runs."""
    before = json.loads((folder / ALL).read_text()) if (folder / ALL).exists() else {}
    (folder / ALL).write_text(json.dumps(before | json.loads((folder / NEW).read_text())))
    (folder / NEW).unlink()


def choose(tests: Iterable[str], run: Run, seconds: float) -> list[str]:
    """As many tests as take ``seconds``, one at least: the cheapest of each file, then the next of each, and so on."""
    places: dict[str, int] = collections.defaultdict(int)
    order = []
    for name in sorted(tests, key=lambda name: (run.seconds[name], name)):
        file = name.partition("::")[0]
        order.append((places[file], run.seconds[name], name))
        places[file] += 1
    chosen: list[str] = []
    for _, cost, name in sorted(order):
        if not chosen or cost <= seconds:
            chosen.append(name)
            seconds -= cost
    return chosen


def most_specific(tests: Iterable[str], run: Run, seconds: float) -> list[str]:
    """The tests that run the fewest lines, as many as take ``seconds``: 12 of 3 files at most, which are collected in a moment."""
    lines = collections.Counter(itertools.chain(*run.tests.values()))
    chosen: list[str] = []
    files: set[str] = set()
    for name in sorted(tests, key=lambda name: (lines[name], name)):
        file = name.partition("::")[0]
        if run.seconds[name] <= seconds and len(files | {file}) <= 3 and len(chosen) < 12:
            chosen.append(name)
            files.add(file)
            seconds -= run.seconds[name]
    return chosen


class Reports:
    """The plugin's part in the process that starts the others: how each test ended, and its seconds."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.tests: dict[str, dict] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self.tests.setdefault(report.nodeid, {"seconds": 0.0, "outcomes": []})
        test["seconds"] += report.duration
        test["outcomes"] = sorted({*test["outcomes"], report.outcome})

    def pytest_sessionfinish(self) -> None:
        (self.folder / NEW).write_text(json.dumps(self.tests))


class Current:
    """The plugin's part in each process with tests: the file that tells commands which test runs."""

    def __init__(self, folder: Path):
        self.file = folder / f"current-{os.environ.get('PYTEST_XDIST_WORKER', '')}"

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.file.write_text(f"{nodeid} (setup)")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self.file.write_text(f"{item.nodeid} (call)")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self.file.write_text(f"{item.nodeid} (teardown)")


def pytest_configure(config: pytest.Config) -> None:
    folder = Path(os.environ["MUTATION_MARKS"])
    config.pluginmanager.register(Current(folder))
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Reports(folder))
