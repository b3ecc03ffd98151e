"""fw-explain: which tokens each layer and head of a language model takes what it knows from, as an HTML page and a picture.

Exact for what a mixer computes: weights of the values that the last token reads, by layer and head. They say what was mixed, not
why the model answers as it does. What is shown for each mixer: docs/explain.md.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .files import load_language_model, reading, write_atomically
from .mixers import MIXERS

START = "</s>"  # what every text begins after


class Part(NamedTuple):
    """Weights of all tokens in one layer, for one thing that its mixer does."""

    layer: int  # from 1, bottom first
    mixer: str
    what: str
    heads: Tensor  # (heads,T)

    def name(self) -> str:
        return f"layer {self.layer}, {self.mixer}: {self.what}"

    def mean(self) -> Tensor:
        """Over the heads, each relative to its largest weight; a sign remains where all heads agree."""
        return relative(self.heads).mean(0)


def relative(weights: Tensor) -> Tensor:
    """(...,T), divided by the largest absolute weight of each row."""
    return weights / weights.abs().amax(-1, keepdim=True).clamp(min=1e-30)


def read_text(text: str, dictionary) -> tuple[list[str], Tensor]:
    """Tokens and their numbers (T), after the symbol that every text begins with. ``text`` is a sentence or a file's name."""
    if os.path.isfile(text):  # which Path.is_file does not answer for a sentence too long for a name
        with reading(Path(text), "a text"):
            text = Path(text).read_text(encoding="utf-8")
    words = text.split()
    if not words:
        raise ValueError("TEXT has no words")
    return [START, *words], torch.tensor([dictionary.eos(), *map(dictionary.index, words)])


@torch.no_grad()
def explain(model, tokens: Tensor) -> list[Part]:
    """tokens (T) -> what the last one takes from all."""
    limit = model.max_positions()
    if len(tokens) > limit:
        raise ValueError(f"TEXT has {len(tokens)} tokens, {START} included; the model takes at most {limit}")
    seen: dict[int, Tensor] = {}
    layers, names = list(model.decoder.layers), {kind: name for name, kind in MIXERS.items()}
    hooks = [
        layer.self_attn.register_forward_pre_hook(lambda _, args, kwargs, i=i: seen.update({i: kwargs["query"]}), with_kwargs=True)
        for i, layer in enumerate(layers)
    ]
    try:
        model(tokens[None])
    finally:
        for hook in hooks:
            hook.remove()
    found = []
    for i, layer in enumerate(layers):
        mixer = getattr(layer.self_attn, "mixer", None)
        name = "softmax" if mixer is None else names[type(mixer)]
        weights = {"attention": attention(layer.self_attn, seen[i])} if mixer is None else mixer.explain(seen[i])
        found += [Part(i + 1, name, what, heads.float()) for what, heads in weights.items()]
    return found


def attention(module, x: Tensor) -> Tensor:
    """Weights of fairseq's attention, whose own are a mean over heads: of the last of x (T,1,C), (heads,T)."""
    q, k = module.q_proj(x[-1, 0]) * module.scaling, module.k_proj(x[:, 0])
    return torch.einsum("hx,thx->ht", q.unflatten(-1, (module.num_heads, -1)), k.unflatten(-1, (module.num_heads, -1))).softmax(-1)


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
            raise ValueError("nothing to write; give --html, --png or both")
        from .explain_page import draw, page, require_matplotlib

        if args.png:
            require_matplotlib()
        logging.getLogger().setLevel(logging.WARNING)  # fairseq opens it for everything
        model, dictionary = load_language_model(args.checkpoint, args.data, "fw-explain", ("fast_weight_lm", "transformer_lm"))
        words, tokens = read_text(args.text, dictionary)
        last = len(words) - 1 if args.last is None else args.last
        if not 0 < last < len(words):
            raise ValueError(f"--last is {last}; TEXT has tokens 1 to {len(words) - 1}")
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
