"""fw-explain: shows which tokens each layer and head of a language model reads from, as an HTML page and a picture.

The weights are exact: they are the factors of the values that the last token reads, by layer and head. They say what was mixed, not
why the model answers as it does. docs/explain.md says what is shown for each mixer.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
from pathlib import Path

from ... import Mistake
from ...files import write_atomically
from ..checkpoints import load_language_model
from ..command import make_parser, mistakes_as_sentences
from .page import draw, page, require_matplotlib
from .weights import explain, read_text

PROG = "fw-explain"
EXAMPLE = 'fw-explain checkpoint_best.pt "the game was released in japan" --html page.html --png picture.png'


def parser() -> argparse.ArgumentParser:
    parser = make_parser(PROG, __doc__, EXAMPLE)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint of a language model")
    parser.add_argument("text", metavar="TEXT", help="a sentence, or a file with one, prepared as the training text was")
    parser.add_argument("--data", help="folder with the model's dict.txt; default: the data folder of the training")
    parser.add_argument(
        "--last", type=int, metavar="N", help="explain what token N of TEXT reads from the tokens before it; default: the last"
    )
    parser.add_argument("--html", type=Path, help="page to write: every layer and head, with numbers under the mouse")
    parser.add_argument("--png", type=Path, help="picture to write (needs matplotlib): heads of short texts, layers of long ones")
    return parser


def main(arguments: list[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    with mistakes_as_sentences(PROG):
        run(args)


def run(args) -> None:
    check_outputs(args)
    logging.getLogger().setLevel(logging.WARNING)  # fairseq opens it for everything
    model, dictionary = load_language_model(args.checkpoint, args.data, PROG, ("fast_weight_lm", "transformer_lm"))
    words, tokens = read_text(args.text, dictionary)
    last = len(words) - 1 if args.last is None else args.last
    if not 0 < last < len(words):
        raise Mistake(f"--last is {last}; TEXT has tokens 1 to {len(words) - 1}")
    words, tokens = words[: last + 1], tokens[: last + 1]
    words = [w if i != dictionary.unk() else f"{w}?" for w, i in zip(words, tokens.tolist())]
    parts = explain(model, tokens)
    title = f"What “{words[-1]}” reads, {Path(args.checkpoint).name}"
    if args.html:
        write_atomically(args.html, lambda part: part.write_text(page(title, words, parts), encoding="utf-8"))
        print(args.html)
    if args.png:
        draw(title, words, parts, args.png)
        print(args.png)


def check_outputs(args) -> None:
    """Refuses to write nothing, or over a file that is read or written too."""
    if args.html is None and args.png is None:
        raise Mistake("nothing to write; give --html, --png or both")
    if args.png:
        require_matplotlib()
    taken = {Path(args.checkpoint).resolve(): "CHECKPOINT"}
    with contextlib.suppress(OSError):  # a sentence may be too long for a name
        taken[Path(args.text).resolve()] = "TEXT"
    for option, path in (("--html", args.html), ("--png", args.png)):
        if path is not None and (other := taken.setdefault(path.resolve(), option)) != option:
            raise Mistake(f"{option} is {path}, which is {other} too; name another file")


if __name__ == "__main__":
    main()
