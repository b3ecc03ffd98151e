"""A user's mistake ends fairseq's commands in one sentence. With FW_TRACEBACK=1 its traceback is shown too."""

from __future__ import annotations

import functools
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from hydra._internal import utils as hydra_utils
from torch.multiprocessing import ProcessRaisedException

from .. import Mistake

FULL = ("FW_TRACEBACK", "HYDRA_FULL_ERROR")
FILES = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)


def sentence(error: BaseException) -> str | None:
    """Returns the message of a user's mistake, and None for a fault of the program, whose traceback says more."""
    if isinstance(error, ProcessRaisedException):  # it has its worker's traceback as text, which ends in "module.Kind: message"
        name, _, said = str(error).rstrip().rpartition("\n")[2].partition(": ")
        kind = class_of(name)
    else:
        kind, said = type(error), str(error)
    return said if is_mistake(kind) else None


def class_of(name: str) -> type:
    """Returns the exception class that a traceback calls ``name``."""
    module, _, name = name.rpartition(".")
    found = getattr(sys.modules.get(module or "builtins"), name, None)
    return found if isinstance(found, type) else BaseException


def is_mistake(kind: type) -> bool:
    """Whether ``kind`` is raised for what the user gave. fairseq raises a plain OSError for a file that is not there."""
    return issubclass(kind, (Mistake, *FILES)) or kind is OSError


def shorten() -> None:
    """Shows mistakes by their sentences in fairseq's commands; another program shows errors in its own way."""
    if "fairseq_cli" in sys.modules and not hasattr(sys.excepthook, "shortened"):
        sys.excepthook = shortened(sys.excepthook)
        own = vars(traceback) | {"print_exception": shortened(traceback.print_exception)}
        hydra_utils.traceback = SimpleNamespace(**own)  # Hydra prints errors itself, with this module


def shortened(original: Callable) -> Callable:
    """Returns a function that prints a mistake's sentence and leaves any other error to ``original``."""

    @functools.wraps(original)
    def show(kind, value, tb) -> None:
        said = None if any(os.environ.get(name) == "1" for name in FULL) else sentence(value)
        if not said:
            original(kind, value, tb)
        else:
            print(f"{Path(sys.argv[0]).name}: {said}", file=sys.stderr)

    show.shortened = True
    return show
