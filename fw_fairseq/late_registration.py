"""For a program that imports the operation first and fairseq later."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder


class WithFairseq(MetaPathFinder):
    """Once: when fairseq has been imported, what fairseq finds in this directory is registered."""

    def find_spec(self, name: str, path, target=None):
        if name != "fairseq" or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module) -> None:
                load(module)
                importlib.import_module(".registration", __package__)

            spec.loader.exec_module = load_and_register
        return spec
