"""Writes Python's own language reference, which the interpreter contains for help(), as train.txt, valid.txt and test.txt.

    python corpus.py FOLDER

Each line is one paragraph in lower case, words and punctuation apart. Topics quote each other: a paragraph is kept only in the
longest topic that has it, or else the test text would be in the training text.
"""

import argparse
import re
from pathlib import Path
from pydoc_data.topics import topics

TOKEN = re.compile(r"\w+|[^\w\s]")
RULER = re.compile(r"^[ *=~^+|-]+$", re.MULTILINE)  # below headings and in tables
VALID, TEST = 3, 4  # of every ten topics, in order of length


def main(folder: Path) -> None:
    splits, seen = {"train": [], "valid": [], "test": []}, set()
    for rank, topic in enumerate(sorted(topics, key=lambda name: (-len(topics[name]), name))):
        split = {VALID: "valid", TEST: "test"}.get(rank % 10, "train")
        for paragraph in re.split(r"\n\s*\n", RULER.sub("", topics[topic])):
            line = " ".join(TOKEN.findall(paragraph.lower()))
            if line and line not in seen:
                seen.add(line)
                splits[split].append(line)
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in splits.items():
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{name}: {len(lines)} paragraphs, {sum(len(line.split()) for line in lines)} tokens")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="for the three files; it is made where it is missing")
    main(parser.parse_args().folder)
