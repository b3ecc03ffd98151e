"""Options as literals. fairseq runs some option strings as Python, and a checkpoint brings its own options with it."""

from __future__ import annotations

import ast
import contextlib
import sys
from argparse import Namespace
from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

LONGEST = 100_000  # items of a repeated list
UNREADABLE = (SyntaxError, ValueError, TypeError, MemoryError, RecursionError)


class NotALiteral(ValueError):
    """``text`` is the whole string."""

    def __init__(self, text: str, name: str = "an option"):
        shown = text if len(text) <= 40 else f"{text[:37]}..."
        super().__init__(
            f"{name} is {shown!r}; it must be a Python literal: numbers, strings, True, False, None, and lists, tuples, sets and"
            f" dicts of them, where + joins and * repeats lists and tuples, up to {LONGEST:,} items"
        )
        self.text = text


def read_literal(text: str) -> object:
    """The value of a string, as ``eval`` gives it, if the string is a literal; nothing in it is run."""
    if not isinstance(text, str):
        raise TypeError(f"eval() takes a string, not a {type(text).__name__}")
    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except UNREADABLE:
        raise NotALiteral(text) from None


def value(node: ast.expr) -> object:
    """``[(512, 3)] * 4 + [(1024, 3)]`` is how fairseq's convolutional models write their layers."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = value(node.left), value(node.right)
        if isinstance(node.op, ast.Add) and type(left) is type(right) in (list, tuple):
            return left + right
        if isinstance(node.op, ast.Mult) and type(left) in (list, tuple) and type(right) is int:
            if len(left) * right > LONGEST:
                raise ValueError("it is too long")
            return left * right
    return ast.literal_eval(node)


def replace_eval() -> None:
    """A module's own name goes before the built-in one: a function finds it, under whatever name others import the function."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "fairseq" and module is not None:
            vars(module).setdefault("eval", read_literal)


@contextlib.contextmanager
def naming(options: object) -> Iterator[None]:
    """A string that is refused here is named as the option that it is."""
    try:
        yield
    except NotALiteral as error:
        found = [name for name, given in plain(options).items() if isinstance(given, str) and given == error.text]
        raise ValueError(str(NotALiteral(error.text, *found[:1]))) from None


def plain(options: object) -> dict:
    if isinstance(options, DictConfig):
        return OmegaConf.to_container(options, resolve=False)
    return vars(options) if isinstance(options, Namespace) else dict(options) if isinstance(options, dict) else {}
