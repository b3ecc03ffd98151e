"""A plugin of pytest that writes, for each test, its seconds and the lines of the package that it ran in its own process."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import FrameType

import pytest


class Lines:
    def __init__(self, package: Path):
        self.root, self.package = str(package.parent), str(package)
        self.tests: dict[str, dict] = {}
        self.found: dict[str, set[int]] = {}

    def trace(self, frame: FrameType, event: str, argument: object):
        """Called when a function begins; follows only those of the package."""
        file = frame.f_code.co_filename
        if not file.startswith(self.package):
            return None
        lines = self.found.setdefault(file[len(self.root) + 1 :], set())
        lines.add(frame.f_lineno)

        def local(frame: FrameType, event: str, argument: object):
            lines.add(frame.f_lineno)
            return local

        return local

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None):
        self.found = {}
        start = time.process_time()
        sys.settrace(self.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            lines = {file: sorted(found) for file, found in self.found.items()}
            self.tests[item.nodeid] = {"seconds": time.process_time() - start, "lines": lines}

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(self.tests))


def choose(tests: dict[str, dict], file: str, line: int, seconds: float) -> list[str]:
    """The cheapest tests that run the line, as many as take ``seconds``; for a line that runs when the module is imported, those
    that run any line of the module."""
    runs = {name: test for name, test in tests.items() if line in test["lines"].get(file, ())}
    runs = runs or {name: test for name, test in tests.items() if file in test["lines"]}
    chosen: list[str] = []
    for name in sorted(runs, key=lambda name: runs[name]["seconds"]):
        if chosen and seconds < runs[name]["seconds"]:
            break
        seconds -= runs[name]["seconds"]
        chosen.append(name)
    return chosen
