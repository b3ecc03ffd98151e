"""A toy pair of languages for tests: another word for each word, adjectives behind their nouns, hyphens and empty lines too."""

from __future__ import annotations

import random
from pathlib import Path

NOUNS = {"cat": "Katze", "dog": "Hund", "bird": "Vogel", "king": "König", "farmer": "Bauer", "mother-in-law": "Schwieger-Mutter"}
ADJECTIVES = {"old": "alt", "young": "jung", "red": "rot", "quiet": "still", "happy": "froh"}
VERBS = {"sees": "sieht", "finds": "findet", "follows": "folgt", "calls": "ruft"}


def pairs(count: int, seed: int):
    draw = random.Random(seed)
    for _ in range(count):
        english, german = [], []
        for verb in (None, *draw.sample(sorted(VERBS), draw.randint(1, 2))):
            adjective, noun = draw.choice(sorted(ADJECTIVES)), draw.choice(sorted(NOUNS))
            english += ([verb] if verb else []) + ["the", adjective, noun]
            german += ([VERBS[verb]] if verb else []) + ["das", NOUNS[noun], ADJECTIVES[adjective]]
        yield " ".join(english).capitalize() + ".", " ".join(german).capitalize() + "."


def write(folder: Path, **counts: int) -> None:
    for seed, (split, count) in enumerate(counts.items()):
        sides = zip(*pairs(count, seed))
        for language, lines in zip(("en", "de"), sides):
            (folder / f"{split}.{language}").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
