"""Trains a unigram (SentencePiece) vocabulary on a training text and cuts three texts into its pieces.

python pieces.py OUT SIZE TRAIN VALID TEST
"""

import sys
from pathlib import Path

from tokenizers import SentencePieceUnigramTokenizer

SPLITS = ("train", "valid", "test")


def main(out: Path, size: int, *texts: str) -> None:
    tokenizer = SentencePieceUnigramTokenizer()
    special = ["<unk>"]
    tokenizer.train(texts[0], vocab_size=size, special_tokens=special, unk_token="<unk>", show_progress=False)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    for name, path in zip(SPLITS, texts):
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        pieces = (" ".join(encoding.tokens) for encoding in tokenizer.encode_batch([line.strip() for line in lines]))
        (out / f"{name}.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
