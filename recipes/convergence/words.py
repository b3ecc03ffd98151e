"""How well the words of a text are predicted by their place, from logs of fairseq-eval-lm --output-word-probs.

python words.py length STREAM_LOG SEGMENTS_LOG LENGTH
                a line for each span of the text, the first of LENGTH words and each other one as long as all before it: its end,
                its perplexity in the stream and in segments
python words.py position SEGMENTS_LOG LENGTH
                a line for each span of places in segments of LENGTH words, the first of one place and each other one as long as all
                before it: its end, and the perplexity of the words there in all segments
"""

from __future__ import annotations

import math
import re
import sys
from itertools import chain
from pathlib import Path

PIECE = re.compile(r"fairseq_cli\.eval_lm[: |]+(\d+) (\S+ \[-?[\d.]+\].*)$")
Words = list[tuple[str, float]]  # with their natural log probabilities


def pieces_of(log: Path) -> list[Words]:
    """The pieces of the text in their order."""
    found = map(PIECE.search, log.read_text(encoding="utf-8", errors="replace").splitlines())
    pieces = {int(piece[1]): piece[2].strip().split("\t") for piece in found if piece}
    if not pieces:
        sys.exit(f"words.py: {log} has no words; it must be a log of fairseq-eval-lm --output-word-probs")
    entries = [[entry.rpartition(" [") for entry in pieces[number]] for number in sorted(pieces)]
    return [[(word, float(value.rstrip("]"))) for word, _, value in piece] for piece in entries]


def spans(count: int, length: int) -> list[tuple[int, int]]:
    """From 0 to ``length``, from there to twice that, and so on; the text ends the last, which is at least half full."""
    found, start, end = [], 0, length
    while start < count and (count - start) * 2 >= end - start:
        found.append((start, min(end, count)))
        start, end = end, 2 * end
    return found


def perplexity(words: Words) -> str:
    return f"{math.exp(-sum(score for _, score in words) / len(words)):.3f}"


def by_length(stream_log: str, segments_log: str, length: str) -> None:
    stream, segments = (list(chain.from_iterable(pieces_of(Path(log)))) for log in (stream_log, segments_log))
    if [word for word, _ in stream] != [word for word, _ in segments]:
        sys.exit(f"words.py: {stream_log} and {segments_log} have other words; both must be of the same text")
    for start, end in spans(len(stream), int(length)):
        print(end, perplexity(stream[start:end]), perplexity(segments[start:end]))


def by_position(segments_log: str, length: str) -> None:
    pieces = pieces_of(Path(segments_log))
    if any(len(piece) != int(length) for piece in pieces[:-1]):
        sys.exit(f"words.py: {segments_log} has segments of another length than {length}")
    for start, end in spans(int(length), 1):
        print(end, perplexity(list(chain.from_iterable(piece[start:end] for piece in pieces))))


if __name__ == "__main__":
    {"length": by_length, "position": by_position}[sys.argv[1]](*sys.argv[2:])
