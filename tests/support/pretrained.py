"""A transformer_lm trained for a few updates, the source of conversions on the command line."""

from __future__ import annotations

import random
import re
from pathlib import Path

from support.commands import USER_DIR, fairseq, succeed

SHAPE = (
    "--task language_modeling --tokens-per-sample 24 --batch-size 8 --decoder-layers 2 --decoder-embed-dim 32"
    " --decoder-input-dim 32 --decoder-output-dim 32 --decoder-ffn-embed-dim 64 --decoder-attention-heads 4"
    " --decoder-normalize-before --optimizer adam --lr 0.005 --no-epoch-checkpoints --log-format simple --log-interval 1 --seed 1"
)


CONVERTED = "--arch fast_weight_lm --update-rule decay --feature-map identity --feature-norm none --feature-dim 4"


def train(data, folder, *args) -> str:
    return succeed(fairseq("train", data, *USER_DIR, *SHAPE.split(), "--save-dir", folder, *args))


def perplexity(data, checkpoint) -> float:
    options = ("--task", "language_modeling", "--tokens-per-sample", 24, "--path", checkpoint)
    printed = succeed(fairseq("eval_lm", data, *USER_DIR, *options))
    return float(re.search(r"Perplexity: ([\d.]+)", printed)[1])


def binarise(folder: Path) -> None:
    """Write words that count up, each line from a word drawn at random, so that attention or a memory sees what comes next."""
    draw = random.Random(0)
    for split, count in {"train": 200, "valid": 20, "test": 40}.items():
        starts = [draw.randrange(40) for _ in range(count)]
        (folder / split).write_text("".join(" ".join(f"w{(s + i) % 40}" for i in range(11)) + "\n" for s in starts))
    prefixes = [part for split in ("train", "valid", "test") for part in (f"--{split}pref", folder / split)]
    succeed(fairseq("preprocess", "--only-source", *prefixes, "--destdir", folder / "bin"))


def pretrain(data: Path, folder: Path) -> None:
    """Save checkpoints of the softmax model in ``folder``."""
    train(data, folder, "--arch", "transformer_lm", "--max-update", 40)
