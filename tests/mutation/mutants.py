"""All places of a source file that can be changed, and what each change makes of the file."""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
               ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult,
             ast.Mod: ast.FloorDiv, ast.And: ast.Or, ast.Or: ast.And}  # fmt: skip
CUDA = [(r" \+ ", " - "), (r" - ", " + "), (r" \* ", " / "), (r" < ", " <= "), (r" > ", " >= "), (r" >= ", " > "), (r" <= ", " < "),
        (r" == ", " != "), (r" && ", " || "), (r" \|\| ", " && "), (r"\b1\.f", "2.f"), (r"\+= ", "= ")]  # fmt: skip


class Mutant(NamedTuple):
    file: str
    line: int
    what: str
    write: Callable[[], str]  # returns the whole changed file

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.what}"


def mutants_of(file: Path, name: str) -> list[Mutant]:
    return [*(python_mutants(file.read_text(), name) if file.suffix == ".py" else cuda_mutants(file.read_text(), name))]


def python_mutants(text: str, name: str) -> Iterator[Mutant]:
    for number, (node, what, _) in enumerate(changes(ast.parse(text))):
        yield Mutant(name, node.lineno, what, functools.partial(changed, text, number))


def changed(text: str, number: int) -> str:
    """Returns the source after its change of this number."""
    tree = ast.parse(text)
    _, _, change = next(itertools.islice(changes(tree), number, None))
    change()
    return ast.unparse(ast.fix_missing_locations(tree))


def changes(tree: ast.Module) -> Iterator[tuple[ast.AST, str, Callable[[], None]]]:
    """The node, the words for it, and the function that changes it within the tree."""
    ignored = {id(part) for node in ast.walk(tree) for kept in unchanged(node) for part in ast.walk(kept)}
    for node in ast.walk(tree):
        if id(node) not in ignored:
            for what, change in changes_of(node):
                yield node, what, change


def unchanged(node: ast.AST) -> Iterator[ast.AST]:
    """Parts that no test is for: annotations, messages and docstrings."""
    if isinstance(node, ast.Raise | ast.JoinedStr):
        yield node
    yield from filter(None, (getattr(node, "annotation", None), getattr(node, "returns", None)))
    body = getattr(node, "body", None)
    if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        yield body[0]


def changes_of(node: ast.AST) -> Iterator[tuple[str, Callable[[], None]]]:
    match node:
        case ast.Compare(ops=[op, *_]) if type(op) in COMPARISONS:
            other = COMPARISONS[type(op)]
            yield f"{type(op).__name__} -> {other.__name__}", lambda: node.ops.__setitem__(0, other())
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in OPERATORS:
            other = OPERATORS[type(op)]
            yield f"{type(op).__name__} -> {other.__name__}", lambda: setattr(node, "op", other())
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield "minus left out", lambda: setattr(node, "op", ast.UAdd())
        case ast.Constant(value=bool(value)):
            yield f"{value} -> {not value}", lambda: setattr(node, "value", not value)
        case ast.Constant(value=int(value)):
            yield f"{value} -> {value + 1}", lambda: setattr(node, "value", value + 1)
        case ast.Constant(value=float(value)):
            yield f"{value} -> {2 * value or 1.0}", lambda: setattr(node, "value", 2 * value or 1.0)
        case ast.If(test=test) | ast.IfExp(test=test):
            yield "condition negated", lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), test))
        case ast.Expr(value=ast.Call()):
            yield "call left out", lambda: setattr(node, "value", ast.Constant(None))


def cuda_mutants(text: str, name: str) -> Iterator[Mutant]:
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        code, slashes, comment = line.partition("//")
        if line.lstrip().startswith(("#", "//", "static_assert")):
            continue
        for pattern, other in CUDA:
            for found in re.finditer(pattern, code):
                other_line = code[: found.start()] + other + code[found.end() :] + slashes + comment
                what = f"{found[0].strip()} -> {other.strip()} at {found.start()}"
                yield Mutant(
                    name, number + 1, what, functools.partial("".join, [*lines[:number], other_line, *lines[number + 1 :]])
                )
