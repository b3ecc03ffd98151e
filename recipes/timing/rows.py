"""Runs a step of a recipe up to the command that would train, with data that are a dictionary and nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WIKITEXT2_PIECES = 3477138  # of the training text, as additive/prepare.sh cuts it
WORDS = {
    "wikitext103": 267744, "baevski_auli": 267744, "enwik8": 208, "additive": 8000, "gpt2": 50260, "wmt14": 40000,
    "terraformer": 32000,
}  # fmt: skip
TOY_WORDS = 32000  # at most
STEPS = [f"{name}/{step}" for name in WORDS for step in ("train.sh", "finetune.sh") if (ROOT / "recipes" / name / step).exists()]


def answer(program: Path, step: str, row: str, **environment: str) -> Any:
    """What ``program`` says in a line of JSON after "answer: ", where the step starts it in place of fairseq-train."""
    with tempfile.TemporaryDirectory() as folder:
        return answer_in(Path(folder), program, step, row, environment)


def answer_in(folder: Path, program: Path, step: str, row: str, environment: dict[str, str]) -> Any:
    name = step.split("/")[0]
    toy = (os.environ | environment).get("TOY") == "1"
    out = Path(f"{folder}_toy" if toy else folder)
    words = "".join(f"w{i} 1\n" for i in range(min(WORDS[name], TOY_WORDS if toy else WORDS[name]) - 4))
    for data in ("bin", "data"):
        for file in ("dict.txt", "dict.en.txt", "dict.de.txt", "train.en-de.en.idx"):
            write(out / data / file, words)
    write(out / row / "start.pt", "")
    write(out / "bin" / "train.bin", "..")
    os.truncate(out / "bin" / "train.bin", 2 * WIKITEXT2_PIECES)  # of which additive/train.sh reads the size alone
    options = ["--source-lang", "en", "--target-lang", "de"] if name == "wmt14" else []
    given = {"OUT": str(folder), "LAUNCH": f"'{sys.executable}' '{program}'", "BIN": str(Path(sys.executable).parent)}
    command = [ROOT / "recipes" / step, row, *options]
    done = subprocess.run(command, env=os.environ | given | environment, capture_output=True, text=True)
    found = re.search(r"^answer: (.*)$", done.stdout, re.MULTILINE)
    if not found:
        last = (done.stderr + done.stdout).strip().splitlines()[-1]
        sys.exit(f"{program.name}: {step} {row} built no model: {last}")
    return json.loads(found[1])


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def configured(arguments: list[str]) -> tuple[Any, Any, Any, Any]:
    """The configuration of a run with these arguments, its task, model and criterion."""
    import torch
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    args = options.parse_args_and_arch(options.get_training_parser(), arguments)
    config = convert_namespace_to_omegaconf(args)
    if "eval_bleu" in config.task:
        config.task.eval_bleu = False
    torch.manual_seed(0)
    task = tasks.setup_task(config.task)
    return config, task, task.build_model(config.model), task.build_criterion(config.criterion)
