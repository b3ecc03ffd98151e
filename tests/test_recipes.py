"""The recipes of the publications, the same scripts at toy size."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ENVIRONMENT, ROOT, succeed

BIN = str(Path(sys.executable).parent)


def recipe(name: str, out, *args, **environment):
    variables = ENVIRONMENT | {"OUT": str(out), "BIN": BIN, "TOY": "1"} | environment
    return subprocess.run(
        ["bash", str(ROOT / "recipes" / name), *map(str, args)], env=variables, capture_output=True, text=True, timeout=600
    )


def perplexities(row: str) -> list[float]:
    return [float(x) for x in re.findall(r"\| (\d+\.\d+)", row)]


@pytest.fixture(scope="module")
def wikitext(tmp_path_factory):
    out = tmp_path_factory.mktemp("wikitext103")
    succeed(recipe("wikitext103/prepare.sh", out))
    return out


@pytest.mark.parametrize("row", ["delta", "delta_stream"])
def test_wikitext103(row, wikitext):
    succeed(recipe("wikitext103/train.sh", wikitext, "small", row, "--max-update", 4))
    log = succeed(recipe("wikitext103/train.sh", wikitext, "small", row, "--max-update", 6))
    assert 'num_updates": "6"' in log and "Loaded checkpoint" in log, "goes on from its last checkpoint"
    printed = succeed(recipe("wikitext103/eval.sh", wikitext, "small", row, SPLIT="valid")).splitlines()[-1]
    assert printed.startswith(f"| small | {row} | valid | ") and 50 < perplexities(printed)[0] < 5000


@pytest.mark.parametrize(
    "name, args, message",
    [
        ("wikitext103/train.sh", ["tiny", "delta"], "SIZE is tiny; it must be small or medium"),
        ("wikitext103/train.sh", ["small", "detla"], "ROW is detla"),
        ("wikitext103/eval.sh", ["small", "linear"], "run recipes/wikitext103/train.sh small linear first"),
    ],
)
def test_mistakes(name, args, message, wikitext):
    done = recipe(name, wikitext, *args)
    assert done.returncode != 0 and message in done.stderr


def test_missing_text(tmp_path):
    done = recipe("wikitext103/prepare.sh", tmp_path / "out", DATA=str(tmp_path))
    assert done.returncode != 0 and "has neither train.txt nor wiki.train.tokens" in done.stderr
    assert not (tmp_path / "out" / "bin").exists()
