"""Runs a sample of mutants: ``tests/mutation.sh --count 60``. Each is written into a copy of the repository, where a copy of this
process runs the tests that reach its line, until one fails."""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from .lines import Lines, choose
from .mutants import Mutant, mutants_of

ROOT = Path(__file__).parents[2]
IMPORTED = ("torch", "fairseq.trainer", "fairseq.tasks.translation", "fairseq.models.transformer_lm", "transformers", "hypothesis")
TESTS = "ops layers models tasks patches tools".split()  # noqa: SIM905
KERNEL_CODE = "cuda/", "fw_fairseq/ops/kernels/"  # all of its tests take too long for the search of lines
KERNELS = "tests/kernels/test_cuda*.py"
LEFT_OUT = "sanitizers", "_gpu", "launch"
PYTEST = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header"]


def copy_of_the_repository(folder: Path) -> Path:
    """Everything that git has here, without what Python and pytest keep."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def in_a_copy_of_this_process(call, folder: Path, seconds: int) -> int | None:
    """The exit code of ``call``, which runs in ``folder``; None after ``seconds``."""
    child = os.fork()
    if not child:
        os.setsid()
        os.chdir(folder)
        quiet = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.path[:0] = [str(folder), str(folder / "tests")]
        code = 70
        with contextlib.suppress(BaseException):
            code = int(call())
        os._exit(code)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def measure_lines(folder: Path, tests: list[str], file: Path) -> None:
    def run() -> int:
        lines = Lines(folder / "fw_fairseq")
        pytest.main([*PYTEST[:1], *PYTEST[2:], *tests], plugins=[lines])
        lines.write(file)
        return 0

    in_a_copy_of_this_process(run, folder, 24 * 3600)


def outcome(mutant: Mutant, folder: Path, tests: list[str], seconds: int) -> str:
    """``killed``, ``survived``, ``too slow`` or ``no test`` for a mutant."""
    if not tests:
        return "no test"
    place = folder / mutant.file
    before = place.read_text()
    place.write_text(mutant.write())
    try:
        code = in_a_copy_of_this_process(lambda: pytest.main([*PYTEST, *tests]), folder, seconds)
    finally:
        place.write_text(before)
    return "too slow" if code is None else "survived" if code == 0 else "killed"


def tests_of_kernels(folder: Path, name: str) -> list[str]:
    """The tests of all kernels, those of the source's name first."""
    files = [file for file in folder.glob(KERNELS) if not any(word in file.name for word in LEFT_OUT)]
    word = Path(name).stem.partition("_")[0]
    return [str(file.relative_to(folder)) for file in sorted(files, key=lambda file: (word not in file.name, file.name))]


def sample(folder: Path, only: str, count: int, seed: int) -> list[Mutant]:
    files = [*(folder / "fw_fairseq").rglob("*.py"), *(folder / "cuda").glob("*.cu*")]
    names = sorted(name for file in files if only in (name := file.relative_to(folder).as_posix()))
    every = [mutant for name in names for mutant in mutants_of(folder / name, name)]
    return random.Random(seed).sample(every, min(count, len(every)))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tests/mutation.sh", description=__doc__)
    parser.add_argument("--count", type=int, default=30, help="mutants of the sample")
    parser.add_argument("--seed", type=int, default=1, help="another seed, another sample")
    parser.add_argument("--only", default="", help="a part of the names of the files to change, such as ops/")
    parser.add_argument("--tests", nargs="+", default=[f"tests/{name}" for name in TESTS], help="tests that may be chosen")
    parser.add_argument("--seconds", type=int, default=60, help="for the tests of one mutant")
    parser.add_argument("--lines", type=Path, help="file that keeps the lines that each test runs; it is read if it exists")
    return parser


def main(arguments: list[str] | None = None) -> dict[str, list[Mutant]]:
    """Prints a line for each mutant and the sums, and returns the mutants by outcome."""
    args = parser().parse_args(arguments)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    found: dict[str, list[Mutant]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as temporary:
        folder = copy_of_the_repository(Path(temporary))
        lines = args.lines.resolve() if args.lines else folder / "lines.json"
        if not lines.exists():
            measure_lines(folder, [name for name in args.tests if (folder / name.partition("::")[0]).exists()], lines)
        tests = json.loads(lines.read_text())
        for mutant in sample(folder, args.only, args.count, args.seed):
            chosen = choose(tests, mutant.file, mutant.line, args.seconds / 4) if mutant.file.endswith(".py") else []
            of_kernels = mutant.file.startswith(KERNEL_CODE)
            if of_kernels:
                chosen += tests_of_kernels(folder, mutant.file)
            end = outcome(mutant, folder, chosen, 5 * args.seconds if of_kernels else args.seconds)
            found[end].append(mutant)
            print(f"{end:9} {mutant}", flush=True)
    print(", ".join(f"{len(mutants)} {end}" for end, mutants in sorted(found.items())))
    return found


if __name__ == "__main__":
    main()
