"""Cuts a text into the symbols of the model's dictionary, as its training text was cut."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import files
from ...errors import Mistake

END = "</s>"  # of a sentence, after which most texts begin
BYTES = "bytes"
SPACE, NEW_LINE = "▁", "↵"  # as they are shown


class Pieces(NamedTuple):
    """The tokens of a text: how they are shown, and as symbols. A text may have been prepared with the pieces or their numbers."""

    shown: list[str]
    symbols: list[list[str]]  # each a way to write all of them


def read_text(text: str, dictionary: Any, tokenizer: str | None = None, first: int | None = None) -> tuple[list[str], Tensor]:
    """Returns tokens, as they are shown, and their numbers (T,), with the symbol that every text begins with.

    text: a sentence or a file's name. tokenizer: see ``choose_tokenizer``; without one, words are what spaces separate. first: the
    number of the symbol that texts begin with; by default the end of sentence.
    """
    given, folder = text, os.path.isdir(text) and text not in dictionary
    if os.path.exists(text) and not os.path.isdir(text):  # which Path does not answer for a sentence too long for a name
        text = files.read_text(Path(text), "a file with a sentence")
    pieces = choose_tokenizer(tokenizer)(text.strip("\n"))
    ways = [[dictionary.eos() if symbol == END else dictionary.index(symbol) for symbol in way] for way in pieces.symbols]
    numbers = min(ways, key=lambda way: way.count(dictionary.unk()))
    if folder or (tokenizer is None and numbers == [dictionary.unk()] and text is given):
        raise Mistake(f"TEXT is {text}, which is neither a file nor a word of the dictionary; give a sentence, or a file with one")
    shown = [f"{word}?" if number == dictionary.unk() else word for word, number in zip(pieces.shown, numbers)]
    first = dictionary.eos() if first is None else first
    return [dictionary[first], *shown], torch.tensor([first, *numbers])


Cut = Callable[[str], Pieces]


def choose_tokenizer(name: str | None) -> Cut:
    """Returns the tokenizer in a file or folder: a folder of GPT-2's, a tokenizer.json, a SentencePiece model or the codes of
    subword-nmt. "bytes": each byte is a symbol, its number."""
    if name is None or name == BYTES:
        return spaces if name is None else as_bytes
    path = Path(name)
    kinds = {".json": _json_tokenizer, ".model": _sentence_pieces}
    read = _of_folder if path.is_dir() else kinds.get(path.suffix, _subword_codes)
    try:
        return read(path)
    except (Exception, SystemExit) as error:  # of any library, or none is installed; subword-nmt ends the program
        why = f" ({str(error).splitlines()[0]})" if str(error).strip() and not isinstance(error, SystemExit) else ""
        raise Mistake(f"--tokenizer {path} cannot be read as a tokenizer{why}; name a file or folder, or {BYTES!r}") from error


def spaces(text: str) -> Pieces:
    """Words that spaces separate."""
    words = text.split()
    return Pieces(words, [words])


def as_bytes(text: str) -> Pieces:
    """Bytes; that of a new line is the end of a sentence, as in recipes/enwik8."""
    data = text.encode()
    shown = [{32: SPACE, 10: NEW_LINE}.get(byte, chr(byte) if 32 < byte < 127 else f"\\x{byte:02x}") for byte in data]
    return Pieces(shown, [[END if byte == 10 else str(byte) for byte in data]])


def _of_folder(path: Path) -> Cut:
    if (path / "tokenizer.json").is_file():
        return _json_tokenizer(path / "tokenizer.json")
    from tokenizers import ByteLevelBPETokenizer

    return of_library(ByteLevelBPETokenizer(str(path / "vocab.json"), str(path / "merges.txt")))


def _json_tokenizer(path: Path) -> Cut:
    from tokenizers import Tokenizer

    return of_library(Tokenizer.from_file(str(path)))


def of_library(tokenizer: Any) -> Cut:
    """A tokenizer of the library tokenizers. Its tokens may be bytes in disguise, which are shown as text."""

    def cut(text: str) -> Pieces:
        found = tokenizer.encode(text)
        shown = [
            piece if piece.startswith(SPACE) else tokenizer.decode([number]).replace(" ", SPACE) or piece
            for piece, number in zip(found.tokens, found.ids)
        ]
        return Pieces([word.replace("\n", NEW_LINE) for word in shown], [found.tokens, list(map(str, found.ids))])

    return cut


def _sentence_pieces(path: Path) -> Cut:
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor(model_file=str(path))

    def cut(text: str) -> Pieces:
        pieces, numbers = processor.encode(text, out_type=str), processor.encode(text, out_type=int)
        return Pieces(pieces, [pieces, list(map(str, numbers))])

    return cut


def _subword_codes(path: Path) -> Cut:
    """The codes of subword-nmt. They cut words that spaces separate; @@ ends a piece that is not the end of a word."""
    from subword_nmt.apply_bpe import BPE

    with path.open(encoding="utf-8") as codes:
        tokenizer = BPE(codes)
    return lambda text: spaces(tokenizer.process_line(text))
