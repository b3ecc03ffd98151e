"""What a conversion says of each tensor."""

from __future__ import annotations

import re
from typing import NamedTuple

KINDS = ("copied", "changed", "new")


class Change(NamedTuple):
    """One line of the report; it stands for the same tensor in all layers."""

    name: str
    what: str  # copied, changed or new
    parameters: int
    how: str


def merged(changes: list[Change]) -> list[Change]:
    """One line for the same tensor in all layers."""
    lines: dict[tuple, Change] = {}
    for change in changes:
        change = change._replace(name=re.sub(r"\.\d+\.", ".*.", change.name))
        key = (change.name, change.what, change.how)
        lines[key] = change._replace(parameters=change.parameters + (lines[key].parameters if key in lines else 0))
    return sorted(lines.values(), key=lambda line: KINDS.index(line.what))


def table(changes: list[Change]) -> str:
    """Returns the report in columns."""
    rows = [(change.what, change.name, f"{change.parameters:,}", change.how) for change in changes]
    for what in KINDS:
        rows.append((what, "all", f"{sum(change.parameters for change in changes if change.what == what):,}", ""))
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows)
