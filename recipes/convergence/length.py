"""Compares the words' log probabilities in one stream and in segments, from two logs of fairseq-eval-lm --output-word-probs.

python length.py STREAM_LOG SEGMENTS_LOG LENGTH
                a line for each span of the text, the first of LENGTH words and each other one as long as all before it: its end,
                its perplexity in the stream and in segments
"""

from __future__ import annotations

import math
import re
import sys
from itertools import chain
from pathlib import Path

PIECE = re.compile(r"fairseq_cli\.eval_lm[: |]+(\d+) (\S+ \[-?[\d.]+\].*)$")


def words_of(log: Path) -> list[tuple[str, float]]:
    """The words of the text in their order, with their natural log probabilities."""
    found = map(PIECE.search, log.read_text(encoding="utf-8", errors="replace").splitlines())
    pieces = {int(piece[1]): piece[2] for piece in found if piece}
    if not pieces:
        sys.exit(f"length.py: {log} has no words; it must be a log of fairseq-eval-lm --output-word-probs")
    entries = chain.from_iterable(pieces[number].strip().split("\t") for number in sorted(pieces))
    return [(word, float(value.rstrip("]"))) for word, _, value in (entry.rpartition(" [") for entry in entries)]


def spans(count: int, length: int) -> list[tuple[int, int]]:
    """From 0 to ``length``, from there to twice that, and so on; the text ends the last, which is at least half full."""
    found, start, end = [], 0, length
    while start < count and (count - start) * 2 >= end - start:
        found.append((start, min(end, count)))
        start, end = end, 2 * end
    return found


def perplexity(scores: list[float]) -> float:
    return math.exp(-sum(scores) / len(scores))


def main(stream_log: str, segments_log: str, length: str) -> None:
    stream, segments = (words_of(Path(log)) for log in (stream_log, segments_log))
    if [word for word, _ in stream] != [word for word, _ in segments]:
        sys.exit(f"length.py: {stream_log} and {segments_log} have other words; both must be of the same text")
    for start, end in spans(len(stream), int(length)):
        both = (perplexity([score for _, score in words[start:end]]) for words in (stream, segments))
        print(end, *(f"{value:.3f}" for value in both))


if __name__ == "__main__":
    main(*sys.argv[1:])
