"""The mutation run: it finds what can be changed, chooses tests by the lines they run, and says which changes none notices."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from mutation import __main__ as run
from mutation.lines import choose
from mutation.mutants import mutants_of
from support.commands import ENVIRONMENT, ROOT

SOURCE = '''"""Text of 1 + 1."""


def larger(x: int, y: int = 0) -> int:
    if x < y or x == 1:
        raise ValueError(f"{x + 1} < {y}")
    print(x)
    return -x + 2.5 * y if True else y
'''
CHANGES = """0 -> 1|condition negated|Or -> And|Lt -> LtE|Eq -> NotEq|1 -> 2|call left out|condition negated|True -> False
Add -> Sub|minus left out|Mult -> Div|2.5 -> 5.0""".replace("\n", "|").split("|")
TESTS = """from fw_fairseq.sums import double, half


def test_double():
    assert double(3) == 6


def test_half():
    half(3)
"""


def test_every_place_of_a_source_is_changed_once(tmp_path):
    (tmp_path / "a.py").write_text(SOURCE)
    mutants = mutants_of(tmp_path / "a.py", "a.py")
    assert sorted(mutant.what for mutant in mutants) == sorted(CHANGES)
    texts = {mutant.write() for mutant in mutants}
    assert len(texts) == len(mutants) and ast.unparse(ast.parse(SOURCE)) not in texts
    assert all("1 + 1" in text and "{x + 1} < {y}" in text for text in texts)


def test_places_of_kernels(tmp_path):
    (tmp_path / "a.cu").write_text("// a + b\n#define A (b + c)\nx = a + b;  // a < b\nif (x < y && z) x += 1.f;\n")
    mutants = mutants_of(tmp_path / "a.cu", "a.cu")
    lines = {mutant.write().splitlines()[mutant.line - 1] for mutant in mutants}
    assert lines == {"x = a - b;  // a < b", "if (x <= y && z) x += 1.f;", "if (x < y || z) x += 1.f;", "if (x < y && z) x = 1.f;",
                     "if (x < y && z) x += 2.f;"}  # fmt: skip


def test_the_cheapest_tests_of_a_line_are_chosen():
    def test(seconds: float, *lines: int) -> dict:
        return {"seconds": seconds, "lines": {"a.py": [*lines]}}

    tests = {"slow": test(5, 1, 2), "quick": test(1, 2), "other": test(0.1, 3), "none": {"seconds": 0, "lines": {}}}
    assert choose(tests, "a.py", 2, 9) == ["quick", "slow"] and choose(tests, "a.py", 2, 3) == ["quick"]
    assert choose(tests, "a.py", 1, 0) == ["slow"]
    assert choose(tests, "a.py", 9, 9) == ["other", "quick", "slow"] and choose(tests, "b.py", 1, 9) == []


def test_a_run_of_a_small_package(tmp_path):
    """One function has a test of its value, another is only called. The repository is left as it is."""
    package, tests = tmp_path / "fw_fairseq", tmp_path / "tests"
    package.mkdir()
    tests.mkdir()
    (package / "__init__.py").touch()
    (package / "sums.py").write_text("def double(x):\n    return x * 2\n\n\ndef half(x):\n    return x / 2\n")
    (tests / "test_sums.py").write_text(TESTS)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    script = f"""
import sys, pathlib
from mutation import __main__ as run
run.ROOT, run.IMPORTED = pathlib.Path({str(tmp_path)!r}), ()
found = run.main(["--count", "9", "--tests", "tests/test_sums.py", "--seconds", "60"])
print({{end: sorted(map(str, mutants)) for end, mutants in found.items()}})
"""
    environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout.splitlines()[-1]) == {
        "killed": ["fw_fairseq/sums.py:2 2 -> 3", "fw_fairseq/sums.py:2 Mult -> Div"],
        "survived": ["fw_fairseq/sums.py:6 2 -> 3", "fw_fairseq/sums.py:6 Div -> Mult"],
    }
    assert done.stdout.splitlines()[-2] == "2 killed, 2 survived"
    assert (package / "sums.py").read_text().endswith("return x / 2\n") and not (tmp_path / "output.txt").exists()


@pytest.mark.parametrize("name", ["fw_fairseq/ops/chunkwise", "cuda/decay"])
def test_the_repository_has_mutants(name):
    mutants = run.sample(ROOT, name, 40, 3)
    assert len(mutants) == 40 and all((ROOT / mutant.file).exists() for mutant in mutants)
    assert [str(m) for m in mutants] == [str(m) for m in run.sample(ROOT, name, 40, 3)]
    assert mutants[0].write() != (ROOT / mutants[0].file).read_text()
