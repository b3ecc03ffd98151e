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

from ..errors import HINT, Mistake

FULL = ("FW_TRACEBACK", "HYDRA_FULL_ERROR")
FILES = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)


def sentence(error: BaseException) -> str | None:
    """Returns the message of a user's mistake, and None for a fault of the program, whose traceback says more."""
    said = last_line(error).partition(": ")[2] if isinstance(error, ProcessRaisedException) else str(error)
    return said if is_mistake(kind_of(error)) or names_option(kind_of(error), said) else None


def kind_of(error: BaseException) -> type:
    """Returns the class of an exception, in a worker too."""
    return class_of(last_line(error).partition(": ")[0]) if isinstance(error, ProcessRaisedException) else type(error)


def last_line(error: BaseException) -> str:
    """Returns "module.Kind: message", the end of an exception's traceback. The error of a worker has that as text."""
    worker = isinstance(error, ProcessRaisedException)
    text = str(error) if worker else "".join(traceback.format_exception_only(type(error), error))
    return text.rstrip().rpartition("\n")[2]


def class_of(name: str) -> type:
    """Returns the exception class that a traceback calls ``name``."""
    module, _, name = name.rpartition(".")
    found = getattr(sys.modules.get(module or "builtins"), name, None)
    return found if isinstance(found, type) else BaseException


def is_mistake(kind: type) -> bool:
    """Whether ``kind`` is raised for what the user gave. fairseq raises a plain OSError for a file that is not there."""
    return issubclass(kind, (Mistake, *FILES)) or kind is OSError


def names_option(kind: type, said: str) -> bool:
    """Whether fairseq refuses an option by an assertion or a ValueError, whose message then begins with the option's name."""
    return kind in (AssertionError, ValueError) and said.startswith("--")


def shorten() -> None:
    """Shows mistakes by their sentences in fairseq's commands; another program shows errors in its own way."""
    if "fairseq_cli" in sys.modules and not hasattr(sys.excepthook, "shortened"):
        sys.excepthook = shortened(sys.excepthook)
        own = vars(traceback) | {"print_exception": shortened(traceback.print_exception)}
        hydra_utils.traceback = SimpleNamespace(**own)  # Hydra prints errors itself, with this module
        hydra_utils.print_exception = print_for_hydra  # 1.0, with this function


def print_for_hydra(etype=None, value=None, tb=None) -> None:
    """Prints an exception; Hydra 1.0 calls the first argument as Python did before 3.10."""
    hydra_utils.traceback.print_exception(type(value), value, tb)


def shortened(original: Callable) -> Callable:
    """Returns a function that prints a mistake's sentence and leaves any other error to ``original``."""

    @functools.wraps(original)
    def show(kind, value, tb) -> None:
        said = None if any(os.environ.get(name) == "1" for name in FULL) else sentence(value)
        if said:
            print(f"{Path(sys.argv[0]).name}: {said}{'' if issubclass(kind_of(value), Mistake) else HINT}", file=sys.stderr)
        else:
            original(kind, value, tb)
        code = getattr(kind_of(value), "exit_code", 1)
        if code != 1:
            raise SystemExit(code)  # Python's own code for an exception is 1

    show.shortened = original
    return show
