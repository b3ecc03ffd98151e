"""Cuts a text into the symbols of the model's dictionary, as its training text was cut."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

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


def read_text(text: str, dictionary, tokenizer: str | None = None, first: int | None = None) -> tuple[list[str], Tensor]:
    """Returns tokens, as they are shown, and their numbers (T,), with the symbol that every text begins with.

    text: a sentence or a file's name. tokenizer: see ``choose_tokenizer``; without one, words are what spaces separate. first: the
    number of the symbol that texts begin with; by default the end of sentence.
    """
    given = text
    if os.path.isdir(text) and text not in dictionary:
        raise Mistake(f"TEXT is {text}, a folder; give a sentence, or a file with one")
    if os.path.exists(text) and not os.path.isdir(text):  # which Path does not answer for a sentence too long for a name
        text = files.read_text(Path(text), "a file with a sentence")
    pieces = choose_tokenizer(tokenizer)(text.strip("\n"))
    if not pieces.shown:
        raise Mistake("TEXT has no words")
    ways = [[dictionary.eos() if symbol == END else dictionary.index(symbol) for symbol in way] for way in pieces.symbols]
    numbers = min(ways, key=lambda way: way.count(dictionary.unk()))
    if tokenizer is None and numbers == [dictionary.unk()] and text is given:
        raise Mistake(f"TEXT is {text}, which is neither a file nor a word of the dictionary; give a sentence, or a file with one")
    shown = [f"{word}?" if number == dictionary.unk() else word for word, number in zip(pieces.shown, numbers)]
    first = dictionary.eos() if first is None else first
    return [dictionary[first], *shown], torch.tensor([first, *numbers])


def choose_tokenizer(name: str | None) -> Callable[[str], Pieces]:
    """Returns the tokenizer in a file or folder: a folder of GPT-2's, a tokenizer.json, a SentencePiece model or the codes of
    subword-nmt. "bytes": each byte is a symbol, its number."""
    if name is None:
        return spaces
    if name == BYTES:
        return as_bytes
    path = Path(name)
    if path.is_dir():
        whole, parts = path / "tokenizer.json", (path / "vocab.json", path / "merges.txt")
        if whole.is_file():
            return json_tokenizer(whole)
        if not all(part.is_file() for part in parts):
            raise Mistake(f"--tokenizer {path} has neither tokenizer.json nor vocab.json with merges.txt")
        with refusals(path):
            return of_library(needed("tokenizers", name).ByteLevelBPETokenizer(*map(str, parts)))
    if not path.is_file():
        raise Mistake(f"--tokenizer {path} is no file or folder; name one, or {BYTES!r}")
    kinds = {".json": json_tokenizer, ".model": sentence_pieces}
    return kinds.get(path.suffix, subword_codes)(path)


def needed(module: str, name: str):
    """Returns a module that is installed only for some tokenizers."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise Mistake(f"--tokenizer {name} needs the package {module.split('.')[0].replace('_', '-')}; install it") from None


@contextlib.contextmanager
def refusals(path: Path) -> Iterator[None]:
    """Within this block, whatever a library raises for a file that it cannot read is one sentence."""
    try:
        yield
    except Mistake:
        raise
    except (Exception, SystemExit) as error:  # subword-nmt ends the program
        why = f" ({str(error).splitlines()[0]})" if str(error).strip() and not isinstance(error, SystemExit) else ""
        raise Mistake(f"--tokenizer {path} cannot be read as a tokenizer{why}") from error


def spaces(text: str) -> Pieces:
    """Words that spaces separate."""
    words = text.split()
    return Pieces(words, [words])


def as_bytes(text: str) -> Pieces:
    """Bytes; that of a new line is the end of a sentence, as in recipes/enwik8."""
    data = text.encode()
    shown = [{32: SPACE, 10: NEW_LINE}.get(byte, chr(byte) if 32 < byte < 127 else f"\\x{byte:02x}") for byte in data]
    return Pieces(shown, [[END if byte == 10 else str(byte) for byte in data]])


def json_tokenizer(path: Path) -> Callable[[str], Pieces]:
    with refusals(path):
        return of_library(needed("tokenizers", str(path)).Tokenizer.from_file(str(path)))


def of_library(tokenizer) -> Callable[[str], Pieces]:
    """A tokenizer of the library tokenizers. Its tokens may be bytes in disguise, which are shown as text."""

    def cut(text: str) -> Pieces:
        found = tokenizer.encode(text)
        shown = [
            piece if piece.startswith(SPACE) else tokenizer.decode([number]).replace(" ", SPACE) or piece
            for piece, number in zip(found.tokens, found.ids)
        ]
        return Pieces([word.replace("\n", NEW_LINE) for word in shown], [found.tokens, list(map(str, found.ids))])

    return cut


def sentence_pieces(path: Path) -> Callable[[str], Pieces]:
    with refusals(path):
        processor = needed("sentencepiece", str(path)).SentencePieceProcessor(model_file=str(path))

    def cut(text: str) -> Pieces:
        pieces, numbers = processor.encode(text, out_type=str), processor.encode(text, out_type=int)
        return Pieces(pieces, [pieces, list(map(str, numbers))])

    return cut


def subword_codes(path: Path) -> Callable[[str], Pieces]:
    """The codes of subword-nmt. They cut words that spaces separate; @@ ends a piece that is not the end of a word."""
    bpe = needed("subword_nmt.apply_bpe", str(path)).BPE
    with refusals(path), path.open(encoding="utf-8") as codes:
        tokenizer = bpe(codes)
    return lambda text: spaces(tokenizer.process_line(text))
