"""Writes a text in GPT-2's tokens, one document in each line: python encode.py MODEL DATA OUTPUT

DATA and OUTPUT are folders with train, valid and test; files that OUTPUT already has stay. fairseq-preprocess ends each line with
</s>, which is GPT-2's end of text.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from fairseq.data.encoders.gpt2_bpe_utils import get_encoder

END = "<|endoftext|>"


def main(model: Path, data: Path, output: Path) -> None:
    encoder = get_encoder(model / "vocab.json", model / "merges.txt")
    output.mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid", "test"):
        if (output / split).exists():
            continue
        with (output / f".{split}.part").open("w") as file:
            for document in documents(data, split):
                if ids := encoder.encode(document):
                    print(*ids, file=file)
        os.replace(file.name, output / split)


def documents(folder: Path, split: str) -> Iterator[str]:
    lines, text = folder / f"{split}.jsonl", folder / f"{split}.txt"
    if lines.exists():
        with lines.open(encoding="utf-8") as file:
            yield from (json.loads(line)["text"] for line in file)
    elif text.exists():
        document: list[str] = []
        with text.open(encoding="utf-8") as file:
            for line in file:
                if line.strip() == END:
                    yield "".join(document)
                    document = []
                else:
                    document.append(line)
        yield "".join(document)
    else:
        sys.exit(f"encode.py: {folder} has neither {lines.name} nor {text.name}; DATA must have one of them")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
