"""For a program that imports the operation first and has fairseq import this directory later: fairseq then takes it for done."""

from __future__ import annotations

import functools
import importlib
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path


class WithFairseq(MetaPathFinder):
    """From when fairseq is imported on, its ``import_user_module`` registers what is here. To look for fairseq changes nothing."""

    def find_spec(self, name: str, path, target=None):
        if name != "fairseq":
            return None
        found = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_wrap(module) -> None:
                load(module)
                wrap_import()

            spec.loader.exec_module = load_and_wrap
        return spec


def wrap_import() -> None:
    from fairseq import utils

    import_user_module = utils.import_user_module

    @functools.wraps(import_user_module)
    def and_register(args) -> None:
        import_user_module(args)
        if getattr(args, "user_dir", None) and Path(args.user_dir).name == __package__:
            importlib.import_module(".models", __package__)

    utils.import_user_module = and_register
