"""The recurrence over parts of one sequence: segments of a kernel launch, and workers (docs/distributed.md)."""
