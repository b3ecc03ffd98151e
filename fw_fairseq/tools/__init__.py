"""The five commands: fw-bench, fw-convert, fw-explain, fw-export-hf and fw-plot."""
