"""Examines this project's functions and transformers' reference functions, or those that are named, and prints a table."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .. import fla
from ..errors import Mistake
from .checks import CHECKS
from .reference import GATES
from .report import examine, table

TRANSFORMERS = {
    "gated_delta_rule": (
        "transformers.models.qwen3_next.modeling_qwen3_next",
        "torch_chunk_gated_delta_rule",
        "torch_recurrent_gated_delta_rule",
    ),
    "kda": ("transformers.models.kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"),
}


def functions(named: Sequence[str]) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """The rule, the name and the function of each that is examined. ``named``: RULE=MODULE:FUNCTION."""
    for rule in GATES if not named else ():
        yield rule, "fw_fairseq", getattr(fla, f"chunk_{rule}")
    for rule, (module, *names) in TRANSFORMERS.items() if not named else ():
        try:
            there = importlib.import_module(module)
        except ImportError:  # an older version, or none
            continue
        yield from ((rule, f"transformers' {name}", getattr(there, name)) for name in names)
    for text in named:
        rule, _, place = text.partition("=")
        module, _, name = place.partition(":")
        if not name:
            raise Mistake(f"{text!r} is no function; give RULE=MODULE:FUNCTION, such as kda=fla.ops.kda:chunk_kda")
        yield rule, place, getattr(importlib.import_module(module), name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table for each rule, and what was refused."""
    parser = argparse.ArgumentParser(prog="python -m fw_fairseq.conformance", description=__doc__)
    parser.add_argument("functions", nargs="*", metavar="RULE=MODULE:FUNCTION", help=f"RULE is one of: {', '.join(GATES)}")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args(arguments)
    found: dict[str, dict[str, Any]] = {}
    for rule, name, function in functions(given.functions):
        found.setdefault(rule, {})[name] = examine(function, rule, given.device)
    for rule, columns in found.items():
        print(f"\n## {rule}\n\n{table(columns)}")
        for name, findings in columns.items():
            for check, finding in findings.items():
                if finding.refused:
                    print(f"\n{name} refused {check} ({CHECKS[check].about}): {finding.refused}")


if __name__ == "__main__":
    main()
