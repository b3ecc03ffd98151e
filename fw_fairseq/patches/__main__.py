"""Prints docs/fairseq_changes.md: ``python -m fw_fairseq.patches``."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from itertools import groupby

from . import CHANGES

HEAD = """\
# Changes to fairseq

`--user-dir fw_fairseq` replaces these functions of fairseq 0.12.2 and 0.12.3 while the program runs; fairseq's files stay as they
are. Each entry says what fairseq does and what happens now. `python -m fw_fairseq.patches` prints this page
from the docstrings.
"""


def page() -> str:
    """Returns the page as Markdown: a section for each module, an entry for each change."""
    lines = [HEAD]
    for module, entries in groupby(CHANGES, key=lambda change: change.function.__module__):
        lines += [f"## {_first_line(sys.modules[module])}", ""]
        places: dict[Callable, list[str]] = {}
        for change in entries:
            places.setdefault(change.function, []).append(f"`{change.place}`")
        lines += [_entry(" and ".join(names), inspect.getdoc(function) or "") for function, names in places.items()]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def _entry(places: str, text: str) -> str:
    return textwrap.fill(f"- {places}: {text}", 132, subsequent_indent="  ", break_on_hyphens=False)


def _first_line(module: object) -> str:
    return (inspect.getdoc(module) or "").split("\n")[0].rstrip(".")


if __name__ == "__main__":
    sys.stdout.write(page())
