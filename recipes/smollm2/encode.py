"""Writes train, valid and test of DATA as fairseq's symbols, each text in one line: python encode.py MODEL DATA OUTPUT"""

import os
import sys
from pathlib import Path

from fw_fairseq.data.pretrained_tokens import PretrainedTokens, PretrainedTokensConfig


def main(model: Path, data: Path, output: Path) -> None:
    tokens = PretrainedTokens(PretrainedTokensConfig(pretrained_tokenizer=str(model)))
    output.mkdir(parents=True, exist_ok=True)
    for split in ("train", "valid", "test"):
        part = output / f"{split}.part"
        part.write_text(tokens.encode((data / f"{split}.txt").read_text(encoding="utf-8")) + "\n")
        os.replace(part, output / split)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
