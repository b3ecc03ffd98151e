"""Runs a sample of mutants: ``tests/mutation.sh --count 60``. Each is written into a copy of the repository, where a copy of this
process runs tests that reach its line, until one fails. One run of all tests, with marks in the code, tells which these are."""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .marks import MODULE, NEW, Run, add_reports, choose, drop_reports, marked, most_specific, read
from .mutants import Mutant, mutants_of

ROOT = Path(__file__).parents[2]
IMPORTED = ("torch", "fairseq.trainer", "fairseq.tasks.translation", "fairseq.models.transformer_lm", "transformers", "hypothesis")
KERNELS = "tests/kernels/test_cuda"
KINDS = "channel_delta", "decay", "delta", "linear"  # sources that begin with one of these share the tests of that name
MARKED = ["-m", "not long", "-p", "mutation.marks", "-p", "no:cacheprovider"]
PYTEST = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header"]


def copy_of_the_repository(folder: Path) -> Path:
    """Everything that git has here, without what Python and pytest keep, and its environment."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    copy_of_the_environment(ROOT / ".venv", folder)
    return folder


def copy_of_the_environment(venv: Path, folder: Path) -> None:
    """Links to all of it, and copies of the files that name the repository: commands run the copy's code."""
    for path in [*venv.glob("*"), *venv.glob("bin/*"), *venv.glob("lib/python3*/site-packages/*")]:
        place = folder / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        text = None
        with contextlib.suppress(OSError, UnicodeDecodeError):
            text = path.read_text() if path.stat().st_size < 100_000 else None
        if text is not None and str(ROOT) in text:
            place.write_text(text.replace(str(ROOT), str(folder)))
            shutil.copymode(path, place)
        elif path.name not in ("bin", "lib", "lib64"):
            place.symlink_to(path)


def in_a_copy_of_this_process(call, folder: Path, seconds: float) -> int | None:
    """The exit code of ``call``, which runs in ``folder``; None after ``seconds``."""
    child = os.fork()
    if not child:
        os.setsid()
        os.chdir(folder)
        quiet = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        sys.path[:0] = [str(folder), str(folder / "tests")]
        if (folder / ".venv").exists():
            sys.executable = str(folder / ".venv" / "bin" / "python")
            multiprocessing.set_executable(sys.executable)
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


def run_with_marks(folder: Path, places: list[tuple[str, int]], tests: list[str], keep: Path, jobs: int) -> None:
    """One run of the tests on a copy of the code with a mark at each line; ``keep`` gets what they write, beside what
    earlier runs of other tests wrote."""
    lines: dict[str, dict[int, int]] = collections.defaultdict(dict)
    for number, (name, line) in enumerate(places):
        lines[name][number] = line
    for name, of_file in lines.items():
        (folder / name).write_text(marked((folder / name).read_text(), of_file))
    [site] = (folder / ".venv").glob("lib/python3*/site-packages")
    (site / "mutation_mark.py").write_text(MODULE)
    marks = keep / "marks"
    marks.mkdir(parents=True, exist_ok=True)
    workers = ["--numprocesses", str(jobs), "--dist", "loadfile", "--no-loadscope-reorder"]
    command = [folder / ".venv" / "bin" / "python", "-m", "pytest", *tests, *workers, *MARKED]
    environment = os.environ | {"MUTATION_MARKS": str(marks), "PYTHONPATH": str(folder / "tests")}
    with (keep / "output.txt").open("w") as output:
        subprocess.run([*map(str, command)], cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)
    if not (marks / NEW).exists():
        raise SystemExit(f"the tests did not run; see {keep / 'output.txt'}")
    add_reports(marks)


def renew_marks(args, places: list[tuple[str, int]], keep: Path, temporary: Path) -> None:
    """Runs the tests with marks whose files are not as they were when ``keep`` last saw them; at first, all."""
    file, sums = keep / "tests.json", sums_of_tests(args.tests)
    before = json.loads(file.read_text()) if file.exists() else {}
    changed = [name for name in sums if sums[name] != before.get(name)]
    gone = [name for name in before if not (ROOT / name).exists()]
    if before:
        drop_reports(keep / "marks", [*changed, *gone])
    else:
        shutil.rmtree(keep / "marks", ignore_errors=True)
    if changed:
        words = (
            "the tests shows which reach which lines" if not before else f"{len(changed)} changed test files shows what they reach"
        )
        print(f"one run of {words}; its output: {keep / 'output.txt'}", flush=True)
        folder = copy_of_the_repository(temporary / "marked")
        run_with_marks(folder, places, changed if before else args.tests, keep, args.jobs)
    file.write_text(json.dumps({name: sum_ for name, sum_ in (before | sums).items() if name not in gone}))


def sums_of_tests(tests: list[str]) -> dict[str, str]:
    """By file with tests the sum of its text."""
    files = [file for name in tests for file in ([ROOT / name] if name.endswith(".py") else (ROOT / name).rglob("test_*.py"))]
    return {file.relative_to(ROOT).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(files)}


class Failed:
    """A plugin of pytest that writes the name of the test that failed."""

    def __init__(self, file: Path):
        self.file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.file.write_text(report.nodeid)


def outcome(mutant: Mutant, folder: Path, tests: list[str], seconds: float, alone: set[str]) -> str:
    """``killed``, ``survived``, ``too slow`` or ``no test`` for a mutant; ``not alone`` where the test that fails also fails alone
    without it. ``alone`` has the tests that are known to pass alone."""
    if not tests:
        return "no test"
    place, failed = folder / mutant.file, folder / "failed.txt"
    before = place.read_text()
    failed.unlink(missing_ok=True)
    place.write_text(mutant.write())
    try:
        code = in_a_copy_of_this_process(lambda: pytest.main([*PYTEST, *tests], plugins=[Failed(failed)]), folder, seconds)
    finally:
        place.write_text(before)
    if code and failed.exists() and (test := failed.read_text()) not in alone:
        if in_a_copy_of_this_process(lambda: pytest.main([*PYTEST, test]), folder, seconds):
            return "not alone"
        alone.add(test)
    return {None: "too slow", 0: "survived", 5: "no test"}.get(code, "killed")


def tests_of_kernels(folder: Path, run: Run, name: str) -> list[str]:
    """The tests of the kernels that include the source, and those of all kernels: with feature maps, and of their bounds."""
    words = {"maps", "scan"}
    for file in (folder / "cuda").glob("*.cu"):
        if Path(name).name in included(file):
            words.add(max((kind for kind in KINDS if file.stem.startswith(kind)), key=len, default=file.stem))
    if "linear" in words:
        words.add("divided")  # reads that are divided by sums of keys, which the same kernels compute
    files = tuple(f"{KERNELS}_{word}.py::" for word in words)
    return [test for test in run.seconds if test.startswith(files)]


def included(file: Path) -> set[str]:
    """The names of a source and of everything that it includes."""
    found, new = set(), {file.name}
    while new:
        found |= new
        texts = [(file.parent / name).read_text() for name in new if (file.parent / name).exists()]
        new = {name for text in texts for name in re.findall(r'#include "(.+)"', text)} - found
    return found


def mutants_in(folder: Path, only: str) -> list[Mutant]:
    files = [*(folder / "fw_fairseq").rglob("*.py"), *(folder / "cuda").glob("*.cu*")]
    names = sorted(name for file in files if only in (name := file.relative_to(folder).as_posix()))
    return [mutant for name in names for mutant in mutants_of(folder / name, name)]


def lines_of(mutants: list[Mutant]) -> list[tuple[str, int]]:
    """The lines of Python that they change, each once."""
    return [*dict.fromkeys((mutant.file, mutant.line) for mutant in mutants if mutant.file.endswith(".py"))]


def check_code(keep: Path, mutants: list[Mutant]) -> None:
    """Refuses a folder with what an earlier run found in other code."""
    file, names = keep / "mutants.txt", "\n".join(map(str, mutants))
    if file.exists() and file.read_text() != names:
        raise SystemExit(f"--keep {keep} has the results of other code or other files; name another folder")
    file.write_text(names)


def earlier(outcomes: Path) -> dict[int, str]:
    """The outcomes of a run that was stopped, by number."""
    lines = outcomes.read_text().splitlines() if outcomes.exists() else []
    return {int(number): end for number, end, _ in (line.split("\t") for line in lines)}


def forget(outcomes: Path) -> None:
    """Keeps only the mutants that a test noticed, so that the others are tried again."""
    lines = outcomes.read_text().splitlines(keepends=True) if outcomes.exists() else []
    outcomes.write_text("".join(line for line in lines if line.split("\t")[1] == "killed"))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tests/mutation.sh", description=__doc__)
    parser.add_argument("--count", type=int, default=30, help="mutants of the sample")
    parser.add_argument("--seed", type=int, default=1, help="another seed, another sample")
    parser.add_argument("--only", default="", help="a part of the names of the files to change, such as ops/")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="tests that may be chosen, such as tests/ops")
    parser.add_argument("--seconds", type=int, default=30, help="for the tests of one mutant")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at the same time, and processes of the run with marks")
    help_ = """folder for what is found: the same command goes on from there after a stop, and another sample starts as soon as the
        test files that have changed have run"""
    parser.add_argument("--keep", type=Path, help=help_)
    parser.add_argument("--again", action="store_true", help="with --keep, try those again that no test noticed")
    return parser


def main(arguments: list[str] | None = None) -> dict[str, list[Mutant]]:
    """Prints a line for each mutant and the sums, and returns the mutants by outcome."""
    args = parser().parse_args(arguments)
    if args.again and not args.keep:
        raise SystemExit("--again needs --keep, which names the folder with the outcomes of the sample")
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    sys.modules.setdefault("torchaudio", None)  # as tests with transformers do, before it looks for that
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    every = mutants_in(ROOT, args.only)
    mutants = random.Random(args.seed).sample(every, min(args.count, len(every)))
    places = lines_of(every)
    with tempfile.TemporaryDirectory() as temporary:
        keep = (args.keep or Path(temporary) / "keep").resolve()
        keep.mkdir(parents=True, exist_ok=True)
        check_code(keep, every)
        outcomes = keep / f"outcomes-{args.count}-{args.seed}.txt"
        if args.again:
            forget(outcomes)
        if len(earlier(outcomes)) < len(mutants):
            renew_marks(args, places, keep, Path(temporary))
        run = read(keep / "marks")
        tests = {place: run.tests.get(number, []) for number, place in enumerate(places)}
        found = run_mutants(args, mutants, run, tests, outcomes, Path(temporary))
    print(", ".join(f"{len(mutants)} {end}" for end, mutants in sorted(found.items())))
    return found


def run_mutants(
    args, mutants: list[Mutant], run: Run, tests: dict[tuple[str, int], list[str]], file: Path, temporary: Path
) -> dict[str, list[Mutant]]:
    """Each mutant in a copy of the repository that no other uses at that time."""
    folders: queue.Queue[Path] = queue.Queue()
    alone: set[str] = set()
    done = earlier(file)
    for job in range(args.jobs):
        folders.put(copy_of_the_repository(temporary / str(job)))

    def result(number: int, mutant: Mutant) -> str:
        if number in done:
            return done[number]
        folder = folders.get()
        kernel = mutant.file.startswith("cuda/")  # their tests compile them
        own = tests_of_kernels(folder, run, mutant.file) if kernel else tests[mutant.file, mutant.line]
        seconds = 4 * args.seconds if kernel else args.seconds
        end = "no test" if kernel else outcome(mutant, folder, most_specific(own, run, seconds / 4), 60 + 3 * seconds, alone)
        if end not in ("killed", "too slow"):
            end = outcome(mutant, folder, choose(own, run, seconds), 60 + 3 * seconds, alone)
        folders.put(folder)
        return end

    found: dict[str, list[Mutant]] = collections.defaultdict(list)
    with ThreadPoolExecutor(args.jobs) as pool, file.open("a") as outcomes:
        for number, end in enumerate(pool.map(result, range(len(mutants)), mutants)):
            mutant = mutants[number]
            found[end].append(mutant)
            print(f"{end:9} {mutant}", flush=True)
            if number not in done:
                outcomes.write(f"{number}\t{end}\t{mutant}\n")
                outcomes.flush()
    return found


if __name__ == "__main__":
    main()
