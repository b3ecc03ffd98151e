"""The recurrence over parts of one sequence: parts of a kernel launch, workers (docs/distributed.md), and packed texts."""
