"""Trains a unigram (SentencePiece) vocabulary on train.txt of a folder and cuts the folder's texts into its pieces.

python pieces.py FOLDER OUT SIZE
"""

import sys
from pathlib import Path

from tokenizers import SentencePieceUnigramTokenizer

SPLITS = ("train", "valid", "test")


def main(folder: Path, out: Path, size: int) -> None:
    for name in SPLITS:
        if not (folder / f"{name}.txt").is_file():
            sys.exit(f"pieces.py: {folder} has no {name}.txt")
    tokenizer = SentencePieceUnigramTokenizer()
    special = ["<unk>"]
    tokenizer.train(str(folder / "train.txt"), vocab_size=size, special_tokens=special, unk_token="<unk>", show_progress=False)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    for name in SPLITS:
        lines = (folder / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        pieces = (" ".join(encoding.tokens) for encoding in tokenizer.encode_batch([line.strip() for line in lines]))
        (out / f"{name}.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
