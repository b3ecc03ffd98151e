"""fw-explain: which tokens each layer and head of a language model takes what it knows from, as an HTML page and a picture.

Exact for what a mixer computes: weights of the values that the last token reads, by layer and head. They say what was mixed, not
why the model answers as it does. What is shown for each mixer: docs/explain.md.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from ... import Mistake
from ...files import write_atomically
from ..checkpoints import load_language_model
from .weights import explain, read_text


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fw-explain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="of a language model")
    parser.add_argument("text", metavar="TEXT", help="a sentence, or a file with one, prepared as the training text was")
    parser.add_argument("--data", help="folder with the model's dict.txt; default: where it was trained from")
    parser.add_argument(
        "--last", type=int, metavar="N", help="explain what token N of TEXT takes from those before; default: the last"
    )
    parser.add_argument("--html", type=Path, help="page to write: every layer and head, weights under the mouse")
    parser.add_argument("--png", type=Path, help="picture to write (needs matplotlib): heads of short texts, layers of long ones")
    return parser


def main(arguments: list[str] | None = None) -> None:
    args = parser().parse_args(arguments)
    try:
        if args.html is None and args.png is None:
            raise Mistake("nothing to write; give --html, --png or both")
        from .page import draw, page, require_matplotlib

        if args.png:
            require_matplotlib()
        logging.getLogger().setLevel(logging.WARNING)  # fairseq opens it for everything
        model, dictionary = load_language_model(args.checkpoint, args.data, "fw-explain", ("fast_weight_lm", "transformer_lm"))
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
    except (OSError, ValueError) as error:
        sys.exit(f"fw-explain: error: {error}")


if __name__ == "__main__":
    main()
