"""Options that fairseq runs as Python

A checkpoint brings its own options with it, so somebody else's checkpoint could run any code.
"""

from __future__ import annotations

import ast
import contextlib
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from ..errors import Mistake
from .replacing import changes

LONGEST = 100_000  # items of a repeated list
UNREADABLE = (SyntaxError, ValueError, TypeError, MemoryError, RecursionError)


class NotALiteral(Mistake):
    """An option is no Python literal; ``text`` is the whole string."""

    def __init__(self, text: str, name: str = "an option") -> None:
        shown = text if len(text) <= 40 else f"{text[:37]}..."
        super().__init__(
            f"{name} is {shown!r}; it must be a Python literal: numbers, strings, True, False, None, and lists, tuples, sets and"
            f" dicts of them, where + joins and * repeats lists and tuples, up to {LONGEST:,} items"
        )
        self.text = text


def read_literal(text: str) -> object:
    """Returns what ``eval`` returns for a string that is a literal, and refuses any other string; nothing in it is run."""
    if not isinstance(text, str):
        raise TypeError(f"eval() takes a string, not a {type(text).__name__}")
    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except UNREADABLE:
        raise NotALiteral(text) from None


def value(node: ast.expr) -> Any:
    """Returns the value of a literal, or of lists and tuples that are joined and repeated: fairseq's convolutional models write
    their layers as ``[(512, 3)] * 4 + [(1024, 3)]``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        left, right = value(node.left), value(node.right)
        if isinstance(node.op, ast.Add) and type(left) is type(right) in (list, tuple):
            return left + right
        if isinstance(node.op, ast.Mult) and type(left) in (list, tuple) and type(right) is int:
            if len(left) * right > LONGEST:
                raise Mistake("it is too long")
            return left * right
    return ast.literal_eval(node)


@changes("eval")
def replace_eval() -> None:
    """fairseq passes some option strings to `eval`, which runs any Python in them. Now `eval` within fairseq reads Python literals,
    and lists and tuples joined by `+` or repeated by `*`; any other string is refused."""
    # A function looks a name up in its own module before the built-in ones, under whatever name others import the function.
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "fairseq" and module is not None:
            vars(module).setdefault("eval", read_literal)


@contextlib.contextmanager
def naming(options: object) -> Iterator[None]:
    """Within this block, the message about a string that is refused names its option."""
    try:
        yield
    except NotALiteral as error:
        found = [name for name, given in as_dict(options).items() if isinstance(given, str) and given == error.text]
        raise Mistake(str(NotALiteral(error.text, *found[:1]))) from None  # not to be named again by a block around this one


def as_dict(options: object) -> dict:
    """Returns options of any of fairseq's kinds as a dictionary."""
    if isinstance(options, DictConfig):
        return cast(dict, OmegaConf.to_container(options, resolve=False))
    return vars(options) if isinstance(options, Namespace) else dict(options) if isinstance(options, dict) else {}
