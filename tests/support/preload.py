"""Imported by the process that test commands are forked from: it imports what each of them would import again."""

from __future__ import annotations

import gc
import importlib
import logging
import os

MODULES = (
    "fairseq.trainer",
    "fairseq.tasks.translation",
    "fairseq.models.transformer_lm",
    "torch._dynamo",  # a second and a half, which torch takes with the first optimizer
    "torch.distributed.fsdp",
)

os.environ.pop("PYTHONPATH", None)  # it only said where this file is
logging.disable(logging.INFO)  # hints at packages that fairseq can do without
for name in MODULES:
    importlib.import_module(name)
logging.disable(logging.NOTSET)
gc.freeze()  # no command searches all this for garbage
