"""The recurrence over parts of one sequence: parts of a kernel launch, and workers (docs/distributed.md)."""
