"""What the pages promise: their links lead somewhere, their tables are complete, their examples run, their options exist."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import re
import runpy
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from fairseq import options, registry
from fairseq.models import MODEL_DATACLASS_REGISTRY, MODEL_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from support.commands import USER_DIR, fairseq, run, succeed
from support.lm_data import sentences

import fw_fairseq.models  # noqa: F401
from fw_fairseq.config import FastWeightConfig, option_name
from fw_fairseq.feature_maps import FEATURE_MAPS
from fw_fairseq.rules import RULES
from fw_fairseq.tools.bench.language_models import SIZES

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
MADE = (".", "outputs", "demo")  # folders of other people's pages, and of what recipes wrote
PAGES = sorted(page for page in ROOT.rglob("*.md") if not page.relative_to(ROOT).parts[0].startswith(MADE))


def blocks(page: str, language: str) -> list[str]:
    """The code of a page, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives to a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    links = [(page, *link) for page in PAGES for link in re.findall(r"\]\(([\w./-]*)(?:#([\w-]+))?\)", page.read_text())]
    broken = []
    for page, path, anchor in links:
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append((page.name, path, anchor))
    assert len(links) > 100 and broken == []


def words(text: str) -> int:
    return sum(re.search(r"\w", word) is not None for word in text.split())


def test_paragraphs_and_cells_are_short():
    """A paragraph or an entry of a list has at most 120 words, a cell of a table 25. Help texts of options may be longer."""
    long, seen = [], 0
    for page in PAGES:
        text = re.sub(r"^```.*?^```|^(?:    |#)[^\n]*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.) )", text):
            seen, row = seen + 1, block.lstrip().startswith("|")
            parts = re.split(r"(?<!\\)\|", block) if row else [block]
            long += [(page.name, part.strip()[:60]) for part in parts if words(part) > (25 if row else 120)]
    assert seen > 1000 and [(page, part) for page, part in long if page != "options.md"] == []


def test_all_pages_together_are_short():
    """A reader finds what matters in 40,000 words: who adds a paragraph cuts another."""
    counted = {str(page.relative_to(ROOT)): words(page.read_text(encoding="utf-8")) for page in PAGES}
    assert len(counted) > 40 and sum(counted.values()) <= 40_000, sorted(counted.items(), key=lambda entry: -entry[1])[:10]


def test_the_index_lists_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md" and f"({page.name})" not in index] == []


def test_the_page_of_options_is_made_of_their_help_texts():
    """And it has all of them."""
    made = runpy.run_path(str(ROOT / "docs" / "options.py"))["page"]()
    assert (ROOT / "docs" / "options.md").read_text() == made
    listed = re.findall(r"^\| `(--[a-z-]+)`", made, re.MULTILINE)
    every = {option_name(f.name) for f in fields(FastWeightConfig) if "help" in f.metadata}
    every |= {"--linear-attention", "--decoder-attentions", "--source-in-front", "--options-from", "--train-only", "--init-std"}
    every |= {"--plain-adaptive-softmax", "--key-dim", "--reset-at-eos", "--sequence-parallel", "--pairs", "--group", "--setting"}
    assert every | {"--teacher", "--state-norm-penalty", "--target-loss"} <= {*listed}
    more_than_once = {name for name in listed if listed.count(name) > 1}  # options of several tasks or losses
    assert more_than_once == {
        "--updates-per-epoch", "--evaluation-sequences", "--evaluation-pairs", "--symbols", "--state-norm-penalty", "--loss-chunk",
    }  # fmt: skip


def test_every_publication_that_a_page_names_has_its_title():
    listed = (ROOT / "docs" / "references.md").read_text()
    name = r"(?:[A-Z][a-z]+ et al\.|[A-Z][a-z]+ (?:and|&) [A-Z][a-z]+|Lei|Mao|Kimi Team) 20\d\d"
    named = {found.replace("&", "and") for page in PAGES for found in re.findall(name, page.read_text())}
    named -= {"Irie and Schmidhuber 2021"}  # the end of three names
    assert len(named) > 20 and {found for found in named if found not in listed} == set()


def test_every_promise_of_the_security_page_has_tests():
    """Those that its source names in comments."""
    promises, _, _ = (ROOT / "SECURITY.md").read_text().partition("The source of this page")
    entries = promises.split("\n- ")[1:]
    named = [re.findall(r"([\w/]+\.py)::(\w+)", " ".join(re.findall(r"<!--(.*?)-->", entry, re.DOTALL))) for entry in entries]
    assert len(entries) > 8 and all(named)
    missing = [(file, name) for tests in named for file, name in tests if f"def {name}(" not in (ROOT / "tests" / file).read_text()]
    assert missing == []


@pytest.mark.parametrize("registry", [RULES, FEATURE_MAPS])
def test_the_page_of_rules_has_every_equation(registry):
    rows = (ROOT / "docs" / "rules.md").read_text().replace("\\|", "|").splitlines()
    for name, entry in registry.items():
        assert any(row.startswith(f"| `{name}` |") and f"`{entry.equation}`" in row for row in rows), name


def test_readme_example_runs():
    [code] = blocks("README.md", "python")
    names = {}
    exec(code, names)
    assert torch.allclose(torch.cat([names["y1"], names["y2"]], 2), names["y"], atol=1e-5)


def test_the_operation_example_runs():
    [code] = blocks("docs/operation.md", "python")
    exec(code, {})


def test_the_first_rule_runs():
    names = {}
    try:
        for code in blocks("docs/tutorials/first_rule.md", "python"):
            exec(code, names)
        assert names["layer"].rule is RULES["erase_and_write"] and names["whole"].abs().sum() > 0
    finally:
        RULES.pop("erase_and_write", None)


def test_the_examples_of_other_libraries_run(tmp_path, monkeypatch):
    """Functions of flash-linear-attention, and the states of an exported model."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    for page in ("docs/fla.md", "docs/states.md"):
        [code] = blocks(page, "python")
        names = {}
        exec(code, names)
        if page == "docs/fla.md":
            assert names["y"].shape == (2, 1, 4, 16) and names["state"].shape == (2, 4, 16, 16)
        else:
            assert names["cache"].get_seq_length() == 12 and 20 <= names["found"].get_seq_length() <= 24
            assert names["text"].shape[1] > 20


def test_the_layers_example_runs():
    [code] = blocks("docs/mixers.md", "python")
    names = {}
    exec(code, names)
    torch.testing.assert_close(torch.cat([names["first"], names["rest"]]), names["sru"](names["x"])[0])
    assert names["state"].inputs.shape == (8, 51, 128) and names["attention"].in_proj.weight.grad.abs().sum() > 0


@pytest.mark.long
@pytest.mark.parametrize("page", ["README.md", "docs/tutorials/first_model.md"])
def test_a_model_of_ones_own_text(page, tmp_path, monkeypatch, capsys):
    """The commands of a page, with fewer updates, and then the lines of Python for its model."""
    for count, split in enumerate(("train", "valid", "test")):
        (tmp_path / f"{split}.txt").write_text("".join(f"{text}\n" for text in sentences(60, count)))
    commands = next(code for code in blocks(page, "bash") if "fairseq-preprocess" in code)
    [code] = blocks("docs/tutorials/first_model.md", "python")
    smaller = {" fw_fairseq ": f" {ROOT / 'fw_fairseq'} --cpu ", " 2000": " 30", " 100 ": " 2 ", " 40": " 8"}
    for size, small in smaller.items():
        assert size in commands
        commands = commands.replace(size, small)
    monkeypatch.chdir(tmp_path)
    path = f"PATH={Path(sys.executable).parent}:$PATH"
    printed = succeed(run("bash", "-euc", f"{path}\n{commands}"))
    assert "Perplexity" in printed and re.search(r"^H-0\t\S+\tthe old cat ", printed, re.MULTILINE)
    capsys.readouterr()
    exec(code, {})
    text, score = capsys.readouterr().out.splitlines()[-2:]
    assert text.startswith("the old cat") and -10 < float(score.split("(")[-1].rstrip(")")) < 0
    if page.startswith("docs"):
        check_how_to_pages(capsys)


def check_how_to_pages(capsys) -> None:
    """The programs that how-to pages have for such a model: a score for each word, and the average of checkpoints."""
    [code] = blocks("docs/howto/log_probabilities.md", "python")
    exec(code, {})
    *each, mean = capsys.readouterr().out.splitlines()[-7:]
    scores = [float(line.split()[-1]) for line in each]
    assert [line.split()[0] for line in each][:3] == ["the", "old", "cat"]
    assert all(line.split()[-1].startswith("-") for line in each)  # a certain word has -0.00
    assert float(re.search(r"-[\d.]+", mean)[0]) == pytest.approx(sum(scores) / 6, abs=0.02)
    [code] = blocks("docs/howto/resume.md", "python")
    Path("average.py").write_text(code)
    same = torch.load("run/checkpoint_best.pt", weights_only=False)
    same["model"] = {name: tensor + (tensor.dim() > 1) for name, tensor in same["model"].items()}
    torch.save(same, "run/other.pt")
    succeed(run(sys.executable, "average.py", "run/checkpoint_best.pt", "run/other.pt", "run/average.pt"))
    average = torch.load("run/average.pt", weights_only=False)["model"]
    for name, tensor in same["model"].items():
        torch.testing.assert_close(average[name], tensor - 0.5 if tensor.dim() > 1 else tensor)
    arguments = ["--path", "run/average.pt", "--task", "stateful_language_modeling", "--batch-size", 1]
    assert "Perplexity" in succeed(fairseq("eval_lm", "bin", *USER_DIR, *arguments))


def test_the_picture_of_the_readme_is_that_of_the_report():
    folder = ROOT / "docs" / "figures"
    names = runpy.run_path(str(folder / "generation.py"))
    report = json.loads((ROOT / "docs" / "results" / "cost.json").read_text())
    assert names["picture"](report) == (folder / "generation.svg").read_text()


ELSEWHERE = {"--config-dir", "--config-name", "--multirun"}  # of Hydra
ELSEWHERE |= {"--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint"}  # of torchrun
ELSEWHERE |= {"--surviving-only", "--show-diff"}  # of cosmic-ray
ELSEWHERE |= {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--requeue", "--signal"}  # of Slurm


def known_options() -> set[str]:
    """Those of fairseq's commands with everything registered, of this project's commands, its recipes and its tests."""
    names = set()
    for command in ("preprocessing", "training", "generation", "interactive_generation", "eval_lm", "validation"):
        names |= {*getattr(options, f"get_{command}_parser")()._option_string_actions}
    chosen = [choice["dataclass_registry"] for choice in registry.REGISTRIES.values()]
    for group in (MODEL_DATACLASS_REGISTRY, TASK_DATACLASS_REGISTRY, *chosen):
        names |= {option_name(f.name) for kind in group.values() if kind is not None for f in fields(kind)}
    parser = argparse.ArgumentParser(conflict_handler="resolve")
    MODEL_REGISTRY["fast_weight_transformer"].add_args(parser)
    names |= {*parser._option_string_actions}
    for source in [*(ROOT / "fw_fairseq" / "tools").rglob("*.py"), *(ROOT / "tests").glob("*/__main__.py")]:
        names |= {*re.findall(r'"(--[a-z][\w-]*)"', source.read_text())}
    for script in [*(ROOT / "recipes").rglob("*.*"), *(ROOT / "docs" / "results").rglob("*.py")]:
        names |= {*re.findall(r"--[a-z][\w-]*", script.read_text())} if script.suffix in (".sh", ".py") else set()
    return names | {f"--{name}" for name in SIZES} | ELSEWHERE


def test_every_option_exists():
    known = known_options()
    named = [(page.name, name) for page in PAGES for name in re.findall(r"(?<![\w-])--[a-z][\w-]*", page.read_text())]
    assert len(named) > 150 and [(page, name) for page, name in named if name not in known] == []


ROOMS = "|".join(path.stem for path in (ROOT / "fw_fairseq").iterdir() if path.stem[0].islower())
PATH = re.compile(rf"`((?:fw_fairseq|tests|cuda|recipes|docs|requirements|{ROOMS})/[\w./-]*\w)`")
NAME = re.compile(rf"`((?:{ROOMS})(?:\.\w+)+)`")


def found(name: str) -> bool:
    """Whether a dotted name below fw_fairseq is a module or something in one."""
    module, *rest = name.split(".")
    place = importlib.import_module(f"fw_fairseq.{module}")
    for part in rest:
        if not hasattr(place, part) and hasattr(place, "__path__"):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(f"{place.__name__}.{part}")
        if not hasattr(place, part):
            return False
        place = getattr(place, part)
    return True


def test_every_name_exists():
    """Files and functions of this project that a page names."""
    texts = {
        str(page.relative_to(ROOT)): page.read_text(encoding="utf-8")
        for page in PAGES
        if page.relative_to(ROOT).parts[0] != "tests"
    }
    paths = [(page, path) for page, text in texts.items() for path in PATH.findall(text)]
    files = (".py", ".cu", ".cuh")
    names = [(page, name) for page, text in texts.items() for name in NAME.findall(text) if not name.endswith(files)]
    places = (ROOT, ROOT / "fw_fairseq")
    assert len(paths) > 40 and [(page, path) for page, path in paths if not any((place / path).exists() for place in places)] == []
    assert len(names) > 20 and [(page, name) for page, name in names if not found(name)] == []
