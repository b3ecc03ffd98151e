"""fw-bench: time and memory of the operation, its layers and whole models, beside their peers."""
