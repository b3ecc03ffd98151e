"""fw-bench: time and memory of the operation and of whole models, beside their peers."""

import os

# Huge pages for every contender's large tensors, or page faults are a good part of what is timed. Before torch allocates.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
