"""Registration where fairseq takes this directory as its user directory but finds it imported already.

fairseq's ``import_user_module`` imports the tasks and models of a user directory together with the directory itself. If a part of
this package, such as ``fw_fairseq.ops``, was imported before, it believes that all is done and registers nothing.
"""

from __future__ import annotations

import functools
import importlib
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


class WithFairseq(MetaPathFinder):
    """Calls ``wrap_import`` as soon as fairseq is imported. Looking for fairseq without importing it changes nothing."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "fairseq":
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_wrap(module: ModuleType) -> None:
                load(module)
                wrap_import()

            spec.loader.exec_module = load_and_wrap  # type: ignore[method-assign]
        return spec


def wrap_import() -> None:
    """Makes fairseq's ``import_user_module`` import ``fw_fairseq.models`` where this directory is the user directory, and find it
    from every folder."""
    from fairseq import utils

    import_user_module = utils.import_user_module

    @functools.wraps(import_user_module)
    def and_register(args: Any) -> None:
        folder = getattr(args, "user_dir", None) or ""
        if folder != __package__ or Path(folder).is_dir():
            import_user_module(args)
        if Path(folder).name == __package__:
            importlib.import_module(".models", __package__)

    utils.import_user_module = and_register
    if any(Path(path).name == __package__ and Path(path).is_file() for path in getattr(import_user_module, "memo", ())):
        importlib.import_module(".models", __package__)  # fairseq is importing a file that an editable installation has left
