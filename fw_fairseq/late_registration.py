"""For a program that imports the operation first and fairseq later."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder


class WithFairseq(MetaPathFinder):
    """Once: when fairseq has been imported, what fairseq finds in this directory is registered. Where a module of this package
    imports fairseq, that waits until it is complete: registration needs it."""

    waiting = False

    def find_spec(self, name: str, path, target=None):
        if self.waiting:
            self.register()
        if name != "fairseq" or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module) -> None:
                load(module)
                self.register()

            spec.loader.exec_module = load_and_register
        return spec

    def register(self) -> None:
        """At once, or when the next module is looked for."""
        own = [module for name, module in sys.modules.items() if name.startswith(f"{__package__}.")]
        incomplete = any(getattr(module.__spec__, "_initializing", False) for module in own)
        if incomplete and not self.waiting:
            sys.meta_path.insert(0, self)
        elif self.waiting and not incomplete:
            sys.meta_path.remove(self)
        self.waiting = incomplete
        if not incomplete:
            importlib.import_module(".registration", __package__)
