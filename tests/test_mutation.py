"""The mutation run: it finds what can be changed, chooses tests that reach it, and says which changes none notices."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
import types

import pytest
from mutation import __main__ as run
from mutation.marks import MODULE, Run, choose, marked, most_specific, read
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
TESTS = """import subprocess
import sys

from fw_fairseq.least import three
from fw_fairseq.sums import double, half

seen = []


def test_double():
    assert double(3) == 6


def test_half():
    half(3)


def test_before():
    seen.append(three())


def test_after_another():
    assert [*seen, three()] == [3, 3]


def test_more():
    source = "from fw_fairseq.sums import more; print(more(2))"
    assert subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout == "4\\n"
"""
MORE_TESTS = """from fw_fairseq.least import never
from fw_fairseq.sums import half


def test_half():
    assert half(0) == 0 and half(1) < 1


def test_never():
    assert not never()
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


def test_marks_stand_before_the_statements_of_lines(tmp_path, monkeypatch):
    """A mark of a line in a function says that the statement runs; one of a line that runs at import, that any function does."""
    text = (
        '"""Text."""\n\nfrom __future__ import annotations\n\nLIMIT = 3\n\n\ndef small(x: int, y: int = 2):\n    """Text."""\n'
        "    if x < 0:\n        return True\n    elif x == 7:\n        y = 8\n    return [x for x in range(y)] == LIMIT\n"
    )
    calls: list[int] = []
    monkeypatch.setitem(sys.modules, "mutation_mark", types.SimpleNamespace(mark=calls.append))
    namespace: dict = {}
    exec(marked(text, {1: 5, 2: 8, 3: 10, 4: 11, 5: 12, 6: 13, 7: 14}), namespace)
    for x, expected in ((-1, [1, 2, 3, 4]), (7, [1, 2, 3, 5, 6, 7]), (1, [1, 2, 3, 5, 7])):
        calls.clear()
        namespace["small"](x)
        assert sorted(calls) == expected


def test_marks_name_the_test_that_runs(tmp_path):
    """In the test's own process by the variable that pytest sets, and in a command by the file; each once."""
    script = "import mutation_mark\nfor number in (3, 3, 5): mutation_mark.mark(number)\n"
    (tmp_path / "mutation_mark.py").write_text(MODULE)
    (tmp_path / "current-gw1").write_text("b.py::test_two (setup)")
    environment = ENVIRONMENT | {"MUTATION_MARKS": str(tmp_path), "PYTEST_XDIST_WORKER": "gw1", "PYTHONPATH": str(tmp_path)}
    environment.pop("PYTEST_CURRENT_TEST", None)
    for more in ({"PYTEST_CURRENT_TEST": "a.py::test_one[x y] (call)"}, {}):
        subprocess.run([sys.executable, "-c", script], env=environment | more, check=True)
    passed = ("a.py::test_one[x y]", "a.py::test_one[z]", "b.py::test_two", "b.py::test_three")
    reports = {name: {"seconds": 2.5, "outcomes": ["passed"]} for name in passed}
    reports["b.py::test_four"] = {"seconds": 2.5, "outcomes": ["failed", "passed"]}
    (tmp_path / "reports.json").write_text(json.dumps(reports))
    run = read(tmp_path)
    assert run.seconds == dict.fromkeys(passed, 2.5)
    assert run.tests[3] == run.tests[5] == ["a.py::test_one[x y]", "b.py::test_three", "b.py::test_two"] and len(run.tests) == 2
    assert sorted(file.read_text().count("\n") for file in tmp_path.glob("marks-*")) == [2, 2]


def test_the_cheapest_tests_of_each_file_are_chosen_first():
    run = Run({"a.py::slow": 5, "a.py::quick": 1, "b.py::one": 2, "c.py::long": 30}, {})
    assert choose(run.seconds, run, 9) == ["a.py::quick", "b.py::one", "a.py::slow"]
    assert choose(run.seconds, run, 3) == ["a.py::quick", "b.py::one"]
    assert choose(["c.py::long", "a.py::slow"], run, 1) == ["a.py::slow"] and choose([], run, 9) == []


def test_the_most_specific_tests_are_those_that_run_the_fewest_lines():
    reached = {0: ["a.py::all", "a.py::some", "b.py::one"], 1: ["a.py::all", "a.py::some"], 2: ["a.py::all"]}
    reached |= {line: ["c.py::x", "d.py::y"] for line in (3, 4, 5, 6)}
    run = Run(dict.fromkeys(["a.py::all", "a.py::some", "b.py::one", "c.py::x", "d.py::y"], 2.0), reached)
    assert most_specific(run.seconds, run, 99) == ["b.py::one", "a.py::some", "a.py::all", "c.py::x"], "of three files"
    assert most_specific(run.seconds, run, 5) == ["b.py::one", "a.py::some"] and most_specific(run.seconds, run, 1) == []
    many = {f"a.py::{i:02}": 0.1 for i in range(20)}
    assert most_specific(many, Run(many, {0: [*many]}), 99) == [*many][:12]


@pytest.mark.long
def test_a_run_of_a_small_package(tmp_path):
    """One function has a test of its value, another is only called, a third runs only in a command, and the test of a fourth fails
    alone. The repository is left as it is, and a run that goes on only prints what it has found."""
    package, tests = tmp_path / "fw_fairseq", tmp_path / "tests"
    for folder in (package, tests):
        folder.mkdir()
    (package / "__init__.py").touch()
    (package / "sums.py").write_text(
        "def double(x):\n    return x * 2\n\n\ndef half(x):\n    return x / 2\n\n\ndef more(x):\n    return x + x\n"
    )
    (package / "least.py").write_text("def never():\n    return not True\n\n\ndef three():\n    return 3\n")
    (tests / "test_sums.py").write_text(TESTS)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["long"]\n')
    (tmp_path / ".gitignore").write_text(".venv\n")
    shutil.copytree(ROOT / "tests" / "mutation", tests / "mutation", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    script = f"""
import sys, pathlib
from mutation import __main__ as run
run.ROOT, run.IMPORTED = pathlib.Path({str(tmp_path)!r}), ()
found = run.main(["--count", "9", "--seconds", "20", "--jobs", "2", "--keep", "found", *sys.argv[1:]])
print({{end: sorted(map(str, mutants)) for end, mutants in found.items()}})
"""

    def mutation(*more):
        environment = ENVIRONMENT | {"PYTHONPATH": str(ROOT / "tests")}
        return subprocess.run([sys.executable, "-c", script, *more], env=environment, capture_output=True, text=True, cwd=tmp_path)

    def ends(*more):
        done = mutation(*more)
        assert done.returncode == 0, done.stderr
        return done.stdout, ast.literal_eval(done.stdout.splitlines()[-1])

    for _ in range(2):
        output, found = ends()
        assert found == {
            "killed": ["fw_fairseq/sums.py:10 Add -> Sub", "fw_fairseq/sums.py:2 2 -> 3", "fw_fairseq/sums.py:2 Mult -> Div"],
            "survived": ["fw_fairseq/sums.py:6 2 -> 3", "fw_fairseq/sums.py:6 Div -> Mult"],
            "no test": ["fw_fairseq/least.py:2 True -> False"],
            "not alone": ["fw_fairseq/least.py:6 3 -> 4"],
        }
        assert output.splitlines()[-2] == "3 killed, 1 no test, 1 not alone, 2 survived"
        (tests / "test_sums.py").write_text("raise SystemExit")  # nothing runs again
    assert (package / "sums.py").read_text().endswith("return x + x\n") and not (tmp_path / "output.txt").exists()
    (tests / "test_sums.py").write_text(TESTS)
    output, found = ends("--count", "3", "--seed", "5")
    assert "one run of" not in output and sum(map(len, found.values())) == 3
    (tests / "test_more.py").write_text(MORE_TESTS)
    output, found = ends("--again")
    assert "one run of 1 changed test files" in output and output.splitlines()[-2] == "5 killed, 1 not alone, 1 survived"
    assert found["survived"] == ["fw_fairseq/sums.py:6 2 -> 3"]
    (tests / "test_more.py").unlink()
    output, found = ends("--again", "--count", "8")
    assert "one run of" not in output
    assert output.splitlines()[-2] == "3 killed, 1 no test, 1 not alone, 2 survived", "tests that are gone are not chosen"
    (package / "sums.py").write_text("def double(x):\n    return 2 * x\n")
    assert (other := mutation()).returncode == 1 and "found has the results of other code" in other.stderr


def test_a_sample_is_tried_again_only_where_it_was_kept():
    with pytest.raises(SystemExit, match="--again needs --keep"):
        run.main(["--again"])


def test_tests_of_a_kernel():
    """Of those that include the source, directly or not, and of what all kernels have in common."""
    names = "delta", "channel_delta", "decay", "linear", "divided", "sru", "gathered", "maps", "scan", "gpu"
    tests = {name: f"tests/kernels/test_cuda_{name}.py::a" for name in names}
    run_of_all = Run(dict.fromkeys(["tests/ops/test_a.py::a", *tests.values()], 1.0), {})
    erase = {"delta", "channel_delta"}
    expected = {"delta_gradients.cuh": {"delta"}, "channel_delta.cu": {"channel_delta"}, "erase.cuh": erase, "sru.cu": {"sru"}}
    expected |= {"columns.cuh": {"decay"}, "tile.cuh": {*erase, "linear", "divided"}, "gathered.cu": {"gathered"}}
    for source, kinds in expected.items():
        found = run.tests_of_kernels(ROOT, run_of_all, f"cuda/{source}")
        assert {*found} == {tests[name] for name in kinds | {"maps", "scan"}}, source


@pytest.mark.parametrize("name", ["fw_fairseq/ops/chunkwise", "cuda/decay"])
def test_the_repository_has_mutants(name):
    mutants = run.mutants_in(ROOT, name)
    assert len(mutants) > 40 and all(mutant.file.startswith(name) for mutant in mutants)
    lines = run.lines_of(mutants)
    assert len(lines) == len({*lines}) and {*lines} == {(x.file, x.line) for x in mutants if x.file.endswith(".py")}
    assert mutants[0].write() != (ROOT / mutants[0].file).read_text()
