"""The five commands: fw-bench, fw-convert, fw-explain, fw-export-hf and fw-plot."""

import logging

logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)  # it asks for tensorboardX when fairseq is imported
