"""Writes a file as text for fairseq: each byte becomes one symbol, its number. The byte of a new line ends a line, and so becomes
fairseq's end of sentence.

python bytes.py SOURCE FOLDER VALID TEST    test.txt has the last TEST bytes, valid.txt the VALID before them, train.txt the rest
"""

import sys
from pathlib import Path

NEW_LINE = b"\n"


def main(source: Path, folder: Path, valid: int, test: int) -> None:
    data = source.read_bytes()
    if len(data) <= valid + test:
        sys.exit(f"bytes.py: {source} has {len(data)} bytes; it must have more than {valid + test}")
    train = len(data) - valid - test
    folder.mkdir(parents=True, exist_ok=True)
    for name, start, end in (("train", 0, train), ("valid", train, train + valid), ("test", train + valid, len(data))):
        with (folder / f"{name}.txt").open("w") as out:
            for line in data[start:end].removesuffix(NEW_LINE).split(NEW_LINE):
                print(*line, file=out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
