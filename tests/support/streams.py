"""Training and evaluation with stateful_language_modeling on the command line."""

from __future__ import annotations

import random
import re
from pathlib import Path

from support.commands import USER_DIR, fairseq, succeed
from support.runs import updates

MODEL = (
    "--arch fast_weight_lm --decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32"
    " --decoder-ffn-embed-dim 64 --decoder-attention-heads 4 --dropout 0.1"
)


TRAIN = (
    "--task stateful_language_modeling --criterion fast_weight_cross_entropy --tokens-per-sample 16 --batch-size 4"
    " --batch-size-valid 3 --optimizer adam --lr 0.01 --seed 3 --log-format json --log-interval 1 --no-epoch-checkpoints"
    " --max-update 6"
)


def training(data, folder, *args, positions=False):
    positions = [] if positions else ["--no-token-positional-embeddings"]
    return [data, *MODEL.split(), *positions, *TRAIN.split(), "--save-dir", folder, *args]


def train(data, folder, *args):
    return updates(succeed(fairseq("train", *training(data, folder, *args), *USER_DIR)))


def evaluate(data, checkpoint, *args):
    printed = succeed(fairseq("eval_lm", data, *USER_DIR, "--path", checkpoint, "--gen-subset", "test", *args))
    return int(re.search(r"Evaluated ([\d,]+)", printed)[1].replace(",", "")), float(re.search(r"2\): ([\d.]+)", printed)[1])


def binarise(folder: Path) -> None:
    """Write a random text of three splits into ``folder``, and what fairseq-preprocess makes of it into its folder bin."""
    words, rng = [f"word{i}" for i in range(40)], random.Random(0)
    for split, lines in (("train", 60), ("valid", 12), ("test", 12)):
        text = [" ".join(rng.choice(words[i % 20 :]) for i in range(rng.randint(3, 15))) for _ in range(lines)]
        (folder / split).write_text("\n".join(text) + "\n")
    prefixes = [x for split in ("train", "valid", "test") for x in (f"--{split}pref", folder / split)]
    succeed(fairseq("preprocess", "--only-source", *prefixes, "--destdir", folder / "bin"))
