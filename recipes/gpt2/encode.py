"""Writes a text in GPT-2's tokens, one document in each line: python encode.py MODEL DATA OUTPUT [PROCESSES]

DATA and OUTPUT are folders with train, valid and test; files that OUTPUT already has stay, and one that was left unfinished is
continued. fairseq-preprocess ends each line with </s>, which is GPT-2's end of text.
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from multiprocessing import Pool
from pathlib import Path

from fairseq.data.encoders.gpt2_bpe_utils import get_encoder

END = "<|endoftext|>"
BLOCK = 500_000  # characters that a process encodes at a time
encoder = None  # of a process


def main(model: Path, data: Path, output: Path, processes: str = "1") -> None:
    output.mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid", "test"):
        if not (output / split).exists():
            encode_split(model, data, split, output, int(processes))


def encode_split(model: Path, data: Path, split: str, output: Path, processes: int) -> None:
    """Encodes blocks of documents, and notes after each round how many are done and how long the file is."""
    part, place = output / f".{split}.part", output / f".{split}.place"
    part.touch()
    done, size = map(int, place.read_text().split()) if place.exists() else (0, 0)
    left = itertools.islice(blocks(documents(data, split)), done, None)
    total, read, start = source(data, split).stat().st_size, 0, time.monotonic()
    with part.open("r+b") as file, Pool(processes, load, (model,)) as pool:
        file.truncate(size)
        file.seek(size)
        while chosen := list(itertools.islice(left, 4 * processes)):  # a pool by itself would read the whole text at once
            for text in pool.imap(encode, chosen):
                file.write(text.encode())
            file.flush()
            done, read = done + len(chosen), read + sum(len(document.encode()) for block in chosen for document in block)
            place.with_suffix(".new").write_text(f"{done} {file.tell()}")
            os.replace(place.with_suffix(".new"), place)
            speed = read / 1e6 / (time.monotonic() - start)
            print(f"encode.py: {split}, {read / 1e6:.1f} MB of at most {total / 1e6:.1f}, {speed:.1f} MB/s", file=sys.stderr)
    os.replace(part, output / split)
    place.unlink(missing_ok=True)


def load(model: Path) -> None:
    global encoder
    encoder = get_encoder(model / "vocab.json", model / "merges.txt")


def encode(block: list[str]) -> str:
    lines = (" ".join(map(str, encoder.encode(document))) for document in block)
    return "".join(f"{line}\n" for line in lines if line)


def blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    block, size = [], 0
    for text in texts:
        block.append(text)
        size += len(text)
        if size >= BLOCK:
            yield block
            block, size = [], 0
    if block:
        yield block


def source(folder: Path, split: str) -> Path:
    found = [path for path in (folder / f"{split}.jsonl", folder / f"{split}.txt") if path.exists()]
    if not found:
        sys.exit(f"encode.py: {folder} has neither {split}.jsonl nor {split}.txt; DATA must have one of them")
    return found[0]


def documents(folder: Path, split: str) -> Iterator[str]:
    path = source(folder, split)
    lines = lines_of(path)
    if path.suffix == ".jsonl":
        yield from (text_of(line, f"line {number} of {path}") for number, line in enumerate(lines, 1) if line.strip())
        return
    document: list[str] = []
    for line in lines:
        if line.strip() == END:
            yield "".join(document)
            document = []
        else:
            document.append(line)
    yield "".join(document)


def lines_of(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        try:
            yield from file
        except UnicodeDecodeError as error:
            sys.exit(f"encode.py: {path} is not in UTF-8 ({error}); write it in UTF-8 first, for example with iconv")


def text_of(line: str, place: str) -> str:
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        document = None
    text = document.get("text") if isinstance(document, dict) else None
    if not isinstance(text, str):
        sys.exit(f'encode.py: {place} is no JSON object with a text; it must be like {{"text": "some words"}}')
    return text


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), *sys.argv[4:])
