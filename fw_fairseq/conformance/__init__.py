"""A referee for recurrences: puts any library's function with flash-linear-attention's arguments through a suite of checks against
the equations in float64 (docs/results/conformance.md). ``python -m fw_fairseq.conformance`` prints a table."""

from .report import Finding, examine, table

__all__ = ["Finding", "examine", "table"]
