"""Runs the checks and writes what they found as a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..errors import Mistake
from .checks import CHECKS, Examined
from .reference import GATES


class Finding(NamedTuple):
    """The outcome of a check: an error, or the sentence with which the function refused."""

    error: float | None
    bound: float
    refused: str = ""

    @property
    def passes(self) -> bool:
        """Whether the function does what the check is for."""
        return self.error is not None and self.error <= self.bound

    def __str__(self) -> str:
        if self.error is None:
            return "refused"
        text = "same" if self.bound == 0 and self.passes else f"{self.error:.0e}"
        return text if self.passes else f"**{text}**"


def examine(function: Callable[..., Any], rule: str, device: str = "cpu") -> dict[str, Finding]:
    """Returns what every check of a rule finds in a function.

    function: takes q, k and v by place, (B,T,H,D), and g, beta, ``initial_state``, ``output_final_state``, ``scale`` and
    ``cu_seqlens`` by name, and returns outputs and the last state, as flash-linear-attention's do. rule: one of
    ``reference.GATES``, which says which gates the function is given.
    """
    if rule not in GATES:
        raise Mistake(f"rule is {rule!r}; allowed: {', '.join(GATES)}")
    examined, found = Examined(function, rule, device), {}
    for name, check in CHECKS.items():
        if check.applies(rule):
            try:
                found[name] = Finding(check.find(examined), check.bound)
            except Exception as error:  # whatever another library raises
                found[name] = Finding(None, check.bound, f"{type(error).__name__}: {error}".partition("\n")[0])
    return found


def table(columns: dict[str, dict[str, Finding]]) -> str:
    """Findings by the names of functions as a table in Markdown: errors, in bold where they are above what the check allows."""
    lines = ["| check | allowed | " + " | ".join(columns) + " |", "|---|---:|" + "---:|" * len(columns)]
    for name, check in CHECKS.items():
        cells = [str(found.get(name, "")) for found in columns.values()]
        allowed = f"{check.bound:.0e}" if check.bound else "same"
        lines.append(f"| {name} | {allowed} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
