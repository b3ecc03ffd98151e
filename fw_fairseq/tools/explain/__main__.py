"""fw-explain: shows which tokens each layer and head of a language model reads from, as an HTML page and a picture.

The weights are exact: they are the factors of the values that a token reads, by layer and head. They say what was mixed, not why
the model answers as it does. docs/explain.md says what is shown for each mixer.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from ...errors import Mistake
from ...files import write_atomically
from ..checkpoints import import_user_dir, load_language_model
from ..command import check_outputs, make_parser, mistakes_as_sentences, refuse_folder, require_matplotlib
from .page import Shown, page
from .picture import draw
from .text import BYTES, read_text
from .weights import explain

PROG = "fw-explain"
ENDINGS = {"--html": (".html", ".htm"), "--png": (".png", ".svg", ".pdf")}
EXAMPLE = 'fw-explain checkpoint_best.pt "the game was released in japan" --html page.html --png picture.png'


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = make_parser(PROG, __doc__, EXAMPLE)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint of a language model")
    parser.add_argument("text", metavar="TEXT", help="a sentence, or a file with one, prepared as the training text was")
    parser.add_argument(
        "--user-dir", type=Path, metavar="FOLDER", help="the user directory of the training, if it was another one than fw_fairseq"
    )
    parser.add_argument("--data", help="folder with the model's dict.txt; default: the data folder of the training")
    parser.add_argument(
        "--tokenizer",
        help="cuts TEXT as the training text was cut: a folder with GPT-2's tokenizer, a tokenizer.json, a SentencePiece model,"
        " codes of subword-nmt, or bytes; default: words that spaces separate",
    )
    said = "show what token N of TEXT reads, or each of several; default: the last"
    parser.add_argument("--last", type=numbers, metavar="N,...", help=said)
    parser.add_argument("--html", type=Path, help="page to write: every layer and head, with numbers under the mouse")
    parser.add_argument("--png", type=Path, help="picture to write (needs matplotlib): heads of short texts, layers of long ones")
    return parser


def numbers(text: str) -> list[int]:
    """An option that is numbers with commas between them."""
    return [int(part) for part in text.split(",")]


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    args = parser().parse_args(arguments)
    with mistakes_as_sentences(PROG):
        run(args)


def run(args: argparse.Namespace) -> None:
    """Writes the page and the picture."""
    _check_files(args)
    if args.user_dir is not None:
        import_user_dir(args.user_dir)  # before the options of models, which have the choices that it adds
    model, dictionary, first = load_language_model(args.checkpoint, args.data, PROG, ("fast_weight_lm", "transformer_lm"))
    logging.getLogger().setLevel(logging.WARNING)  # the first import of fairseq opens it for everything
    words, tokens = read_text(args.text, dictionary, args.tokenizer, first)
    unknown, total = int((tokens[1:] == dictionary.unk()).sum()), len(tokens) - 1
    if 2 * unknown > total:
        said = f"{unknown} of {total} words are not in the model's dictionary, so the weights are mostly those of <unk>"
        print(f"{PROG}: {said}; prepare TEXT as the training text was, or name its tokenizer by --tokenizer", file=sys.stderr)
    readers = list(dict.fromkeys([len(words) - 1] if args.last is None else args.last))
    if wrong := [reader for reader in readers if not 0 < reader < len(words)]:
        raise Mistake(f"--last is {wrong[0]}; TEXT has tokens 1 to {len(words) - 1}" if total else "TEXT has no words")
    readings = [
        Shown(words[: found.reader + 1], found.parts, [(dictionary[word], chance) for word, chance in found.expected])
        for found in explain(model, tokens[: max(readers) + 1], readers)
    ]
    title = f"{PROG}: {Path(*Path(args.checkpoint).resolve().parts[-2:])}"  # the run and its file
    if args.html:
        write_atomically(args.html, lambda part: part.write_text(page(title, readings), encoding="utf-8"))
        print(args.html)
    if args.png:
        draw(title, readings, args.png)
        print(args.png)


def _check_files(args: argparse.Namespace) -> None:
    """Refuses to write nothing, or over a file that is read or written too, or that is no page or picture."""
    if args.html is None and args.png is None:
        raise Mistake("nothing to write; give --html, --png or both")
    if args.png:
        require_matplotlib("--png needs")
    inputs = {"CHECKPOINT": args.checkpoint, "--tokenizer": args.tokenizer or BYTES}
    if len(os.fsencode(args.text)) < 256:  # a sentence may be too long for a name
        inputs["TEXT"] = args.text
    outputs = [(option, path) for option, path in (("--html", args.html), ("--png", args.png)) if path is not None]
    check_outputs(outputs, inputs.items())
    for option, path in outputs:
        if path.suffix not in ENDINGS[option] and (path.is_file() or not path.exists()):  # a pipe has no ending
            raise Mistake(f"{option} is {path}; it must end in {' or '.join(ENDINGS[option])}")
        refuse_folder(option, path)


if __name__ == "__main__":
    main()
