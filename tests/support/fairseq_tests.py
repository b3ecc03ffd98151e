"""fairseq's own tests, with this project's changes to fairseq and without them.

``python -m support.fairseq_tests FOLDER [TEST...]``, where FOLDER is a checkout of fairseq: its tests run on the installed fairseq.
"Without" has only what fairseq 0.12 needs to run on today's torch and NumPy at all. The command fails if a test passes without the
changes and fails with them, three times in a row.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from xml.etree import ElementTree

WITH = "FW_CHANGES"
LEFT_OUT = ("gpu", "speech", "speech_recognition", "distributed", "test_binaries.py")  # hours, GPUs, or packages that are not here
REPEATS = 3


def pytest_configure(config: object) -> None:
    """As a plugin of pytest, in the process that runs fairseq's tests."""
    if os.environ.get(WITH) == "1":
        import fw_fairseq.models  # noqa: F401

        return
    import numpy
    import torch

    torch.load = functools.partial(torch.load, weights_only=False)
    if not hasattr(numpy, "compat"):
        numpy.compat = types.SimpleNamespace(long=int)  # noqa: NPY201


def outcomes(report: Path) -> dict[str, str]:
    """``passed``, ``failed`` or ``skipped`` by test, from pytest's report in XML."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {part.tag for part in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return found


def run(folder: Path, changes: bool, tests: list[str]) -> dict[str, str]:
    report = folder / "report.xml"
    environment = os.environ | {WITH: str(int(changes)), "PYTHONPATH": f"{Path(__file__).parents[1]}:{folder}"}
    options = ["-q", "-p", "support.fairseq_tests", "-p", "no:cacheprovider", "-o", "addopts=", f"--junitxml={report}"]
    options += ["--continue-on-collection-errors"]
    subprocess.run([sys.executable, "-m", "pytest", *options, *tests], cwd=folder, env=environment, check=False)
    return outcomes(report)


def lost(without: dict[str, str], with_changes: dict[str, str]) -> list[str]:
    return sorted(name for name, outcome in without.items() if outcome == "passed" and with_changes.get(name) == "failed")


def counts(found: dict[str, str]) -> str:
    return ", ".join(f"{[*found.values()].count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped"))


def main(source: str, *tests: str) -> int:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shutil.copytree(Path(source) / "tests", folder / "tests", ignore=shutil.ignore_patterns(*LEFT_OUT))
        without, failing = run(folder, False, [*tests] or ["tests"]), []
        for repeat in range(REPEATS):
            changed = run(folder, True, [*tests] or ["tests"])
            failing = lost(without, changed) if repeat == 0 else sorted({*failing} & {*lost(without, changed)})
            if not failing:
                break
    print(f"without the changes: {counts(without)}\nwith the changes: {counts(changed)}")
    for name in failing:
        print(f"only without the changes: {name}")
    return int(bool(failing))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
