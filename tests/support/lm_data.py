"""A small binarised text of sentences."""

from __future__ import annotations

import random
from pathlib import Path

from support.commands import fairseq, succeed

SMALL = (
    "--arch fast_weight_lm --decoder-layers 2 --decoder-embed-dim 32 --decoder-input-dim 32 --decoder-output-dim 32"
    " --decoder-ffn-embed-dim 64 --decoder-attention-heads 4 --dropout 0.1"
)


NOUNS = "cat dog bird fox horse child king queen farmer sailor doctor river tree stone house garden"


VERBS = "sees finds follows paints carries leaves meets calls builds watches"


ADJECTIVES = "old young small large red green quiet happy cold bright"


PLACES = "forest town harbour valley kitchen castle market school field island"


def sentences(count: int, seed: int):
    draw = random.Random(seed)
    nouns, verbs, adjectives, places = (words.split() for words in (NOUNS, VERBS, ADJECTIVES, PLACES))
    for _ in range(count):
        words = ["the", draw.choice(adjectives), draw.choice(nouns), draw.choice(verbs), "a", draw.choice(nouns)]
        yield " ".join(words + (["in", "the", draw.choice(places)] if draw.random() < 0.6 else []) + ["."])


def binarise(folder: Path) -> None:
    """Write the sentences of three splits into ``folder``, and what fairseq-preprocess makes of them into its folder bin."""
    for seed, (split, count) in enumerate({"train": 300, "valid": 50, "test": 50}.items()):
        (folder / split).write_text("".join(line + "\n" for line in sentences(count, seed)))
    prefixes = [part for split in ("train", "valid", "test") for part in (f"--{split}pref", folder / split)]
    succeed(fairseq("preprocess", "--only-source", *prefixes, "--destdir", folder / "bin"))
