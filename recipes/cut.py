"""Copies the beginning of a binarised text: python cut.py DATA SPLIT COUNT FOLDER

COUNT is a number of words, or of sentences where the text is in two languages. FOLDER gets them as the same split, with the
dictionaries of DATA.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from fairseq.data import indexed_dataset


def main(data: Path, split: str, count: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for dictionary in data.glob("dict*.txt"):
        shutil.copy(dictionary, folder)
    found = [path for path in data.glob(f"{split}.*") if path.suffix == ".idx"]
    if not found:
        sys.exit(f"cut.py: {data} has no binarised text {split}")
    for path in found:
        cut(path.with_suffix(""), folder / path.stem, count, words=path.stem == split)


def cut(source: Path, target: Path, count: int, words: bool) -> None:
    lines = indexed_dataset.MMapIndexedDataset(str(source))
    builder = indexed_dataset.MMapIndexedDatasetBuilder(f"{target}.bin", dtype=lines._index.dtype)
    for number in range(len(lines)):
        line = lines[number][: count if words else None]
        builder.add_item(line)
        count -= len(line) if words else 1
        if count == 0:
            break
    builder.finalize(f"{target}.idx")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
